"""A simulated process's own end of the lifecycle link."""

from dataclasses import dataclass
from typing import cast

import zmq

from protocol.config import EngineConfig
from protocol.lifecycle import Command, Drain, Hello, Role, Stop
from protocol.process.child_runtime import ChildProcess
from protocol.process.progress import ProgressReporter
from protocol.process.run_dir import client_address, lifecycle_address
from protocol.process.supervisor_link import SupervisorLink
from protocol.transport.channel import DealerChannel, HighWaterMark
from tests.simulation.sockets import SimulatedSocket, WouldWait, make_context
from tests.simulation.wire import Wire
from tests.simulation.world import Process

RUN_DIR = "/nowhere"
CLIENT_ADDRESS = client_address(RUN_DIR)


@dataclass(frozen=True)
class Incarnation:
    """The arguments with which a process is started."""

    role: Role
    rank: int
    epoch: int
    config: EngineConfig
    page_fd: int | None
    """The descriptor of its progress page."""


class SimulatedChild(ChildProcess):
    """A `ChildProcess` whose supervisor is at the other end of the simulated wire."""

    def __init__(self, wire: Wire, process: Process, life: Incarnation) -> None:
        # The base class parses arguments, watches the parent, and blocks until it is connected.
        clock = wire.world.clock
        self.role, self.rank, self.epoch = life.role, life.rank, life.epoch
        self.pid = process.pid
        self.config = life.config
        self.run_dir = life.config.run.run_dir or RUN_DIR
        self.context = cast("zmq.Context[zmq.Socket[bytes]]", make_context(wire, process))
        turn_s = life.config.recovery.api_hang_timeout_s if life.role is Role.API else None
        self.reporter = ProgressReporter(
            life.page_fd, life.epoch, life.config.recovery, turn_s, clock
        )
        if self.reporter.page is not None:
            process.on_death.append(self.reporter.page.close)
        self._lifecycle = DealerChannel(
            self.context, lifecycle_address(self.run_dir), HighWaterMark.LIFECYCLE_LINK
        )
        self._supervisor = SupervisorLink(self._lifecycle, self.epoch, clock)
        self._is_terminated = False
        self._deliver_soon = None
        socket = cast(SimulatedSocket, self._lifecycle.socket)
        assert socket.monitor is not None
        self._link_events = socket.monitor.events
        self._has_sent_hello = False
        self.inbox = socket.inbox
        """Commands that have arrived."""
        self.has_stop = False
        self.drain: Drain | None = None
        """The first; later ones change nothing."""

    def messages(self) -> list[Command]:
        """Return the commands that have arrived."""
        self._connect()
        messages = super().messages()
        self.has_stop |= any(isinstance(message, Stop) for message in messages)
        drains = (message for message in messages if isinstance(message, Drain))
        self.drain = self.drain or next(drains, None)
        return messages

    def _connect(self) -> None:
        """Send Hello as soon as there is a connection."""
        assert self._lifecycle is not None
        assert self._supervisor is not None
        if self._link_events:
            self._lifecycle.link_events()
        if not self._has_sent_hello:
            hello = Hello(self.role, self.rank, self.pid)
            self._has_sent_hello = self._supervisor.send(hello)

    def poll_promotion(self) -> bool | None:
        """Take one turn of the real wait; None while it goes on."""
        assert self._supervisor is not None
        self._connect()
        self._supervisor.repeat()
        try:
            return self.wait_for_promotion()
        except WouldWait:
            return None
