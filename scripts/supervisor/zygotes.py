"""The zygotes of a supervisor, and the workers that they were asked to fork.

Such a worker is known by its epoch until the zygote of its rank reports its pid; its own Hello may
come first.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import zmq

from protocol.lifecycle import Fatal, Progress, Ready, Role
from protocol.message import ProtocolError
from protocol.process.child_handle import ChildHandle
from protocol.process.fork_server import ForkServer
from protocol.process.zygote_link import Forked, ForkFailed
from protocol.transport.runtime import Poller
from scripts.supervisor.actions import Slot

log = logging.getLogger("troika.supervisor")


class StartEvent(NamedTuple):
    """A message of a zygote about itself, or the failure of a start."""

    slot: Slot
    epoch: int
    message: Progress | Ready | Fatal


@dataclass(slots=True)
class _Fork:
    """A worker that is to be forked, with the pid and connection of an early Hello."""

    slot: Slot
    pid: int = 0
    peer: bytes | None = None


class Zygotes:
    """The zygote of each rank, and the forks that it has not reported yet."""

    def __init__(
        self, poller: Poller, enter: Callable[[Slot, ChildHandle, bytes | None], None]
    ) -> None:
        """`enter` takes each forked worker, and its connection if its Hello came first."""
        self._poller = poller
        self._enter = enter
        self._servers: dict[int, ForkServer] = {}
        """The zygotes by their ranks."""
        self._forks: dict[int, _Fork] = {}
        """The forks by their epochs."""

    def add(self, rank: int, server: ForkServer) -> None:
        """Add the zygote of a rank, which was just started."""
        self._servers[rank] = server
        self._poller.register(server.link, zmq.POLLIN)

    def fork(self, slot: Slot, epoch: int, page_fd: int) -> None:
        """Request a worker or a standby; OSError: there is no zygote, or it does not read."""
        server = self._servers.get(slot.rank)
        if server is None:
            raise OSError("there is no zygote")
        server.fork(epoch, page_fd, is_standby=slot.role is Role.STANDBY)
        self._forks[epoch] = _Fork(slot)

    def connect(self, epoch: int, pid: int, peer: bytes) -> None:
        """Note the pid and the connection of a Hello that came before the report of its fork."""
        fork = self._forks.get(epoch)
        if fork is not None:
            fork.pid, fork.peer = pid, peer

    def give_up(self, slot: Slot) -> bool:
        """Give up the requested worker of a slot; return whether there is one."""
        epoch = next((epoch for epoch, fork in self._forks.items() if fork.slot == slot), None)
        if epoch is None:
            return False
        del self._forks[epoch]
        server = self._servers.get(slot.rank)
        if server is not None:
            server.disown(epoch)
        return True

    def receive(self) -> list[StartEvent]:
        """Receive messages of the zygotes, and enter the workers that they have forked."""
        servers = list(self._servers.items())
        return [event for rank, server in servers for event in self._events_of(rank, server)]

    def _events_of(self, rank: int, server: ForkServer) -> list[StartEvent]:
        slot = Slot(Role.ZYGOTE, rank)
        try:
            messages = server.receive()
        except ProtocolError as error:
            log.error("the %s is killed: %s", slot, error)
            server.child.kill()
            return []
        events: list[StartEvent] = []
        for message in messages:
            match message:
                case Forked():
                    events += self._on_forked(server, message)
                case ForkFailed():
                    server.disown(message.epoch)
                    events += self._on_fork_failed(message.epoch, message.error)
                case _:
                    events.append(StartEvent(slot, server.child.epoch, message))
        return events

    def _on_forked(self, server: ForkServer, forked: Forked) -> list[StartEvent]:
        try:
            child = server.claim(forked)
        except (OSError, ProtocolError) as error:  # ProtocolError: it was given up, and ends
            return self._on_fork_failed(forked.epoch, str(error))
        fork = self._forks.pop(child.epoch)
        self._enter(fork.slot, child, fork.peer if fork.pid == child.pid else None)
        return []

    def _on_fork_failed(self, epoch: int, error: str) -> list[StartEvent]:
        fork = self._forks.pop(epoch, None)
        return [] if fork is None else [StartEvent(fork.slot, epoch, Fatal("start", error))]

    def remove(self, rank: int) -> list[StartEvent]:
        """Remove the dead zygote of a rank; the workers requested from it fail to start."""
        server = self._servers.pop(rank)
        self._poller.unregister(server.link)
        asked = [epoch for epoch, fork in self._forks.items() if fork.slot.rank == rank]
        server.close()
        failed = [self._on_fork_failed(epoch, "the zygote has died") for epoch in asked]
        return [event for events in failed for event in events]
