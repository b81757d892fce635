"""The supervisor's dealings with its zygote: workers asked for, born and given up.

A worker that was asked for is known by its epoch until the zygote tells its pid; its own Hello may
come first.
"""

from dataclasses import dataclass

import zmq

from protocol import zygote_link
from protocol.child_handle import Child, ChildHandle
from protocol.config import EngineConfig
from protocol.forked_child import ForkServer
from protocol.lifecycle import Fatal, Progress, Ready
from protocol.message import ProtocolError
from protocol.runtime import Poller
from protocol.zygote_link import ForkFailed
from scripts.supervisor.system import System

_MAX_EARLY = 16


@dataclass(frozen=True, slots=True)
class Forked:
    """A worker runs; `peer` is where its Hello came from, if it has come already."""

    child: ChildHandle
    peer: bytes | None


@dataclass(frozen=True, slots=True)
class ZygoteMessage:
    """A message about the zygote itself."""

    epoch: int
    message: Progress | Ready | Fatal


Event = Forked | ForkFailed | ZygoteMessage


class ZygoteClient:
    """At most one zygote at a time; without any, nothing here does anything."""

    def __init__(self, poller: Poller, system: System) -> None:
        self._poller = poller
        self._system = system
        self._server: ForkServer | None = None
        self._early: dict[int, tuple[int, bytes]] = {}
        """Pid and peer of workers that have said Hello before the zygote told of them."""

    def start_zygote(self, config: EngineConfig, epoch: int, progress_fd: int | None) -> Child:
        """Start it; its death is noticed like any other's, and told with `zygote_died`.

        Raises:
            OSError: it cannot be started.
        """
        assert self._server is None
        self._server = self._system.start_fork_server(config, epoch, progress_fd)
        self._poller.register(self._server.link, zmq.POLLIN)
        return self._server.child

    def zygote_died(self) -> list[ForkFailed]:
        """Close what belonged to it, before its descriptors are used again."""
        server, self._server = self._server, None
        assert server is not None
        self._poller.unregister(server.link)
        failed = [ForkFailed(epoch, "the zygote has died") for epoch in server.asked]
        server.close()
        return failed

    def ask(self, epoch: int, rank: int, progress_fd: int | None, *, is_standby: bool) -> None:
        """Ask for a worker; `receive` tells what has become of it.

        Raises:
            OSError: there is no zygote, or it does not listen.
        """
        if self._server is None:
            raise OSError("there is no zygote")
        self._early.clear()
        self._server.fork(epoch, rank, progress_fd, is_standby=is_standby)

    def give_up(self, epoch: int) -> bool:
        """Let a worker that is not there yet end by itself; whether there was such a one."""
        return self._server is not None and self._server.disown(epoch)

    def hello(self, epoch: int, pid: int, peer: bytes) -> None:
        """A worker that nobody knows yet has said Hello."""
        if self._server is not None and epoch in self._server.asked:
            self._early[epoch] = (pid, peer)

    def receive(self) -> list[Event]:
        """What has happened since.

        Raises:
            ProtocolError: the zygote talks nonsense.
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
        """Reap dead workers that were given up; `known` are the pids of all others."""
        self._system.reap_strangers(known)
