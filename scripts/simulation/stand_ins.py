"""What the real loops find where they expect the operating system: clock, pids, polls, libzmq.

The loops reach for these through names in their modules. For the time of a run those names stand
for the objects here; nothing else of the loops is changed.
"""

import contextlib
import enum
import signal
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import zmq

import core_proc.loop
import core_proc.watch
import core_proc.worker_link
import protocol.channel
import protocol.client
import protocol.core_link
import protocol.open_requests
import protocol.pulse
import worker_proc.loop
import worker_proc.null_runner
from protocol.channel import DealerChannel, HighWaterMark
from protocol.config import EngineConfig
from protocol.lifecycle import (
    Command,
    Drained,
    Hello,
    Progress,
    Ready,
    RestartReply,
    Role,
    StatusReply,
    Stop,
    ToSupervisor,
    decode_from_supervisor,
)
from protocol.message import encode
from protocol.pulse import Pulse
from scripts.simulation.sockets import SimulatedContext, SimulatedSocket, Wire
from scripts.simulation.world import KilledHere, Process, Violation, World

CLIENT_ADDRESS = "ipc:///nowhere/core.sock"
WORKER_ADDRESS = "ipc:///nowhere/workers.sock"
SUPERVISOR_ADDRESS = "ipc:///nowhere/supervisor.sock"
FAILPOINT_MODULES = (
    *(core_proc.loop, core_proc.worker_link),
    *(protocol.open_requests, worker_proc.loop, worker_proc.null_runner),
)
"""Those whose failpoints may kill whoever gets there."""
_WALL_CLOCK = 1_700_000_000.0


class SimulatedPoller:
    """A `zmq.Poller` that never waits: its process is woken when there is something."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pidfds: set[int] = set()
        self._sockets: list[SimulatedSocket] = []

    def register(self, item: Any, flags: int = zmq.POLLIN) -> None:
        """A socket or a descriptor of a process."""
        if isinstance(item, int):
            self._pidfds.add(item)
        elif isinstance(item, SimulatedSocket):
            self._sockets.append(item)

    def unregister(self, item: Any) -> None:
        """Poll it no more."""
        if isinstance(item, int):
            self._pidfds.discard(item)
        elif isinstance(item, SimulatedSocket):
            self._sockets.remove(item)

    def poll(self, timeout: int | None = None) -> list[tuple[Any, int]]:
        """The dead, and the sockets with something to read."""
        ready: list[tuple[Any, int]] = [
            (fd, zmq.POLLIN) for fd in sorted(self._pidfds) if self._is_dead(fd)
        ]
        ready += [(socket, zmq.POLLIN) for socket in self._sockets if socket.inbox]
        return ready

    def _is_dead(self, fd: int) -> bool:
        process = self._world.process_of(fd)
        return process is not None and not process.is_alive


@dataclass(frozen=True)
class Incarnation:
    """What a process is told when it is started."""

    role: Role
    rank: int
    epoch: int
    config: EngineConfig
    page_fd: int | None
    """Of its progress page."""


class SimulatedChild:
    """A `ChildProcess` whose supervisor is at the other end of the simulated wire."""

    def __init__(self, wire: Wire, process: Process, life: Incarnation) -> None:
        self.context = SimulatedContext(wire, process)
        self.role = life.role
        self.epoch = life.epoch
        self.rank = life.rank
        self.config = life.config
        self.pulse = Pulse(life.page_fd, life.epoch, life.config.recovery)
        if self.pulse.page is not None:
            process.on_death.append(self.pulse.page.close)
        self.num_fenced_frames = 0
        self.core_client_address = CLIENT_ADDRESS
        self.core_worker_address = WORKER_ADDRESS
        self.is_told_to_stop = False
        self._greeting: list[ToSupervisor] = [Hello(life.role, life.rank, process.pid)]
        self._link = DealerChannel(
            self.context,  # type: ignore[arg-type]
            SUPERVISOR_ADDRESS,
            HighWaterMark.LIFECYCLE_LINK,
        )

        self._socket: Any = self._link.socket

    @property
    def lifecycle_socket(self) -> Any:
        """To poll."""
        return self._socket

    def messages(self) -> list[Command]:
        """Commands that have arrived; what could not be said before is said now."""
        if not (self._greeting or self._socket.inbox or self._socket.has_link_events):
            return []
        self._link.link_events()
        while self._greeting and self._link.send(self.epoch, encode(self._greeting[0])):
            self._greeting.pop(0)
        messages: list[Command] = []
        for received in self._link.drain(limit=16):
            message = decode_from_supervisor(received.body)
            if received.header.epoch != self.epoch:
                self.num_fenced_frames += 1
            elif not isinstance(message, StatusReply | RestartReply):
                messages.append(message)
        self.is_told_to_stop |= any(isinstance(message, Stop) for message in messages)
        return messages

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Report a step of the start."""
        self.pulse.load(phase, done)
        self._greeting.append(Progress(phase, done, total))

    def ready(self, detail: str = "") -> None:
        """Report that the start is over."""
        self._greeting.append(Ready(detail))

    def drained(self) -> None:
        """Report that nothing is running here any more."""
        self._greeting.append(Drained())


_ZMQ = {
    name: int(value) if isinstance(value, int) and isinstance(value, enum.Enum) else value
    for name, value in vars(zmq).items()
}


def _plain_zmq() -> types.SimpleNamespace:
    """The module with plain integers for its options: enums take their time."""
    return types.SimpleNamespace(**_ZMQ)


@contextlib.contextmanager
def stand_ins(world: World, wire: Wire) -> Iterator[None]:
    """Let the modules of the loops see the simulated world."""

    def pid() -> int:
        assert world.current is not None
        return world.current.pid

    def context() -> SimulatedContext:
        assert world.current is not None
        return SimulatedContext(wire, world.current)

    def pidfd_open(pid: int) -> int:
        fd = world.open_pidfd(pid)
        if fd is None:
            raise ProcessLookupError(pid)
        return fd

    def send_signal(pidfd: int, number: int) -> None:
        process, sender = world.process_of(pidfd), world.current
        assert process is not None
        assert sender is not None
        assert number == signal.SIGKILL
        world.counts["killed by core"] += 1
        raise Violation(f"misbehaved: {sender.name} kills {process.name}")

    def reach(name: str, when: bool = True) -> None:
        process = world.current
        if when and process is not None and world.rng.random() < wire.failpoint_rate:
            world.counts[f"kill at {name}"] += 1
            raise KilledHere

    def sleep(seconds: float) -> None:
        assert world.current is not None
        world.current.sleep(seconds)

    time = types.SimpleNamespace(
        monotonic=world.seconds,
        perf_counter=world.seconds,
        monotonic_ns=lambda: world.local_time * 1000,
        perf_counter_ns=lambda: world.local_time * 1000,
        time=lambda: _WALL_CLOCK + world.seconds(),
        sleep=sleep,
    )
    system = types.SimpleNamespace(getpid=pid, pidfd_open=pidfd_open, close=lambda fd: None)
    sockets = _plain_zmq()
    sockets.Context = context
    sockets.Poller = lambda: SimulatedPoller(world)
    secrets = types.SimpleNamespace(token_bytes=world.rng.randbytes)
    signals = types.SimpleNamespace(SIGKILL=signal.SIGKILL, pidfd_send_signal=send_signal)
    places: list[tuple[types.ModuleType, dict[str, Any]]] = [
        (core_proc.loop, {"zmq": sockets, "time": time}),
        (core_proc.watch, {"os": system, "signal": signals}),
        (protocol.channel, {"secrets": secrets, "zmq": sockets}),
        (protocol.client, {"time": time}),
        (protocol.core_link, {"zmq": sockets, "os": system}),
        (protocol.pulse, {"time": time}),
        (worker_proc.loop, {"zmq": sockets, "time": time, "os": system}),
        (worker_proc.null_runner, {"time": time}),
    ]
    for module in FAILPOINT_MODULES:
        places.append((module, {"reach": reach}))
    before = [(module, {name: vars(module)[name] for name in names}) for module, names in places]
    try:
        for module, names in places:
            vars(module).update(names)
        yield
    finally:
        for module, names in before:
            vars(module).update(names)
