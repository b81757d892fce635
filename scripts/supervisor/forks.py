"""The supervisor's connection to its zygote: forks that were requested, completed and given up.

A worker is known by its epoch until the zygote reports its pid; its own Hello may come first.
"""

from dataclasses import dataclass

import zmq

from protocol import zygote_link
from protocol.config import EngineConfig
from protocol.lifecycle import Fatal, Progress, Ready
from protocol.message import ProtocolError
from protocol.process.child_handle import Child, ChildHandle
from protocol.process.fork_server import ForkServer
from protocol.transport.runtime import Poller
from protocol.zygote_link import ForkFailed
from scripts.supervisor.system import System

_MAX_EARLY = 16


@dataclass(frozen=True, slots=True)
class Forked:
    """A worker was forked; `peer` is the connection of its Hello, if that was received already."""

    child: ChildHandle
    peer: bytes | None


@dataclass(frozen=True, slots=True)
class ZygoteMessage:
    """A message of the zygote about itself."""

    epoch: int
    message: Progress | Ready | Fatal


Event = Forked | ForkFailed | ZygoteMessage


class ZygoteClient:
    """At most one zygote at a time."""

    def __init__(self, poller: Poller, system: System) -> None:
        self._poller = poller
        self._system = system
        self._server: ForkServer | None = None
        self._early: dict[int, tuple[int, bytes]] = {}
        """Pid and peer of workers whose Hello came before the zygote's report."""

    def start_zygote(self, config: EngineConfig, epoch: int, progress_fd: int | None) -> Child:
        """Start a zygote; its death must be reported with `zygote_died`.

        Raises:
            OSError: it cannot be started.
        """
        assert self._server is None
        self._server = self._system.start_fork_server(config, epoch, progress_fd)
        self._poller.register(self._server.link, zmq.POLLIN)
        return self._server.child

    def zygote_died(self) -> list[ForkFailed]:
        """Close what belonged to the dead zygote; returns the forks that fail with it."""
        server, self._server = self._server, None
        assert server is not None
        self._poller.unregister(server.link)
        failed = [ForkFailed(epoch, "the zygote has died") for epoch in server.asked]
        server.close()
        return failed

    def ask(self, epoch: int, rank: int, progress_fd: int | None, *, is_standby: bool) -> None:
        """Request a fork; `receive` returns the result.

        Raises:
            OSError: there is no zygote, or it does not listen.
        """
        if self._server is None:
            raise OSError("there is no zygote")
        self._early.clear()
        self._server.fork(epoch, rank, progress_fd, is_standby=is_standby)

    def give_up(self, epoch: int) -> bool:
        """Give up a requested fork, so that the worker ends by itself; False if there is none."""
        return self._server is not None and self._server.disown(epoch)

    def hello(self, epoch: int, pid: int, peer: bytes) -> None:
        """Enter the Hello of a worker whose fork was not reported yet."""
        if self._server is not None and epoch in self._server.asked:
            self._early[epoch] = (pid, peer)

    def receive(self) -> list[Event]:
        """Receive the zygote's messages, and the results of forks.

        Raises:
            ProtocolError: the zygote has sent an invalid message.
        """
        server = self._server
        if server is None:
            return []
        return [self._event(server, message) for message in server.receive()]

    def _event(self, server: ForkServer, message: zygote_link.FromZygote) -> Event:
        if isinstance(message, ForkFailed):
            server.disown(message.epoch)
            return message
        if not isinstance(message, zygote_link.Forked):
            return ZygoteMessage(server.child.epoch, message)
        try:
            child = server.claim(message)
        except (OSError, ProtocolError) as error:  # ProtocolError: it was given up, and ends
            return ForkFailed(message.epoch, str(error))
        pid, peer = self._early.pop(child.epoch, (0, b""))
        return Forked(child, peer if pid == child.pid else None)

    def reap(self, known: frozenset[int]) -> None:
        """Reap dead workers that were given up; `known` are the pids of all other processes."""
        self._system.reap_strangers(known)
