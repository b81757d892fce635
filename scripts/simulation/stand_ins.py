"""What the real loops find where they expect the operating system: clock, pids, polls, libzmq.

The loops reach for these through names in their modules. For the time of a run those names stand
for the objects here; nothing else of the loops is changed.
"""

import contextlib
import enum
import signal
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import zmq

import api_proc.journaling
import api_proc.sessions
import core_proc.loop
import core_proc.pidfd_monitor
import core_proc.worker_link
import protocol.channel
import protocol.client
import protocol.core_link
import protocol.journal
import protocol.multipart
import protocol.open_requests
import protocol.progress
import protocol.supervisor_link
import scripts.supervisor.forks
import scripts.supervisor.process_table
import scripts.supervisor.supervisor
import worker_proc.loop
import worker_proc.null_runner
from protocol.channel import (
    DealerChannel,
    HighWaterMark,
    client_address,
    lifecycle_address,
    worker_address,
)
from protocol.child_runtime import ChildProcess
from protocol.config import EngineConfig
from protocol.journal import Journal
from protocol.journal_segments import Sync
from protocol.lifecycle import (
    Command,
    Drain,
    Drained,
    Hello,
    Progress,
    Ready,
    Role,
    Stop,
    ToSupervisor,
)
from protocol.progress import ProgressReporter
from protocol.supervisor_link import SupervisorLink
from scripts.simulation.disk import Condition, Disk, Thread
from scripts.simulation.sockets import SimulatedContext, SimulatedSocket, WouldWait, receive, send
from scripts.simulation.wire import Wire
from scripts.simulation.world import KilledHere, Process, Violation, World

RUN_DIR = "/nowhere"
CLIENT_ADDRESS = client_address(RUN_DIR)
WORKER_ADDRESS = worker_address(RUN_DIR)
SUPERVISOR_ADDRESS = lifecycle_address(RUN_DIR)
FAILPOINT_MODULES = (
    *(core_proc.loop, core_proc.worker_link),
    *(protocol.open_requests, worker_proc.loop, worker_proc.null_runner),
)
"""Those whose failpoints may kill whoever gets there."""
_WALL_CLOCK = 1_700_000_000.0
_READABLE = int(zmq.POLLIN)


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
            (socket, _READABLE) for socket in self._sockets if socket.inbox
        ]
        dead = self._pidfds & self._world.dead_pidfds
        return [*((fd, _READABLE) for fd in sorted(dead)), *ready] if dead else ready


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
        turn_s = life.config.recovery.api_hang_timeout_s if life.role is Role.API else None
        self.reporter = ProgressReporter(life.page_fd, life.epoch, life.config.recovery, turn_s)
        if self.reporter.page is not None:
            process.on_death.append(self.reporter.page.close)
        self.core_client_address = CLIENT_ADDRESS
        self.core_worker_address = WORKER_ADDRESS
        self.is_told_to_stop = False
        self.drain: Drain | None = None
        """The first, which is obeyed."""
        self._unsaid: list[ToSupervisor] = [Hello(life.role, life.rank, process.pid)]
        """Until there is a connection: the real one waits for that before it begins."""
        self._link = DealerChannel(
            self.context,  # type: ignore[arg-type]
            SUPERVISOR_ADDRESS,
            HighWaterMark.LIFECYCLE_LINK,
        )
        socket: Any = self._link.socket
        self.lifecycle_socket = socket
        """To poll."""
        self._link_events = socket.monitor.events
        self._supervisor = SupervisorLink(self._link, self.epoch)

    def messages(self) -> list[Command]:
        """Commands that have arrived; what could not be said before is said now."""
        self._say()
        messages = self._supervisor.read()
        self.is_told_to_stop |= any(isinstance(message, Stop) for message in messages)
        drains = (message for message in messages if isinstance(message, Drain))
        self.drain = self.drain or next(drains, None)
        return messages

    def _say(self) -> None:
        if self._link_events:
            self._link.link_events()
        while self._unsaid and self._supervisor.say(self._unsaid[0]):
            self._unsaid.pop(0)

    def progress(self, phase: str, done: int = 0, total: int = 0) -> None:
        """Report a step of the start."""
        self.reporter.load(phase, done)
        self._unsaid.append(Progress(phase, done, total))

    def ready(self, detail: str = "") -> None:
        """Report that the start is over."""
        self._supervisor.hold(Ready(detail))

    def drained(self) -> None:
        """Report that nothing is left to finish."""
        self._supervisor.hold(Drained())

    def wait_for_promotion(self) -> bool | None:
        """One turn of the real waiting; None: it goes on."""
        self._say()
        self._supervisor.repeat()
        try:
            return ChildProcess.wait_for_promotion(cast(ChildProcess, self))
        except WouldWait:
            return None


_ZMQ = {
    name: int(value) if isinstance(value, int) and isinstance(value, enum.Enum) else value
    for name, value in vars(zmq).items()
}


def _plain_zmq() -> types.SimpleNamespace:
    """The module with plain integers for its options: enums take their time."""
    return types.SimpleNamespace(**_ZMQ)


class _NoFile:
    """A `Path` under which there is nothing to remove."""

    def __init__(self, path: str) -> None:
        """Sockets here have no files."""

    def unlink(self, *, missing_ok: bool) -> None:
        """It is not there."""


class _NoCounter:
    """A control group without a limit of memory."""

    def take(self) -> bool:
        """Nobody was killed for it."""
        return False


class _OneRandom:
    """The module `random`, with the world's own source."""

    def __init__(self, world: World) -> None:
        """Every `Random` is the world's."""
        self.Random = lambda: world.rng


def _reap_nobody(known: frozenset[int]) -> None:
    """Nobody is left over for whom the system would keep a place."""


def _pass_by(name: str, when: bool = True) -> None:
    """A failpoint where nobody is killed."""


def _journal_places(disk: Disk, time: object) -> list[tuple[types.ModuleType, dict[str, Any]]]:
    def thread(target: Callable[[], None], **_: object) -> Thread:
        return Thread(disk, target)

    def journal(directory: str, *callbacks: Any, sync: Sync | None = None) -> Journal:
        return Journal(
            disk.directory, *callbacks, open_file=disk.open_file, write=disk.write, sync=sync
        )

    threads = types.SimpleNamespace(Thread=thread, Condition=Condition)
    return [
        (api_proc.journaling, {"Journal": journal, "os": types.SimpleNamespace(fsync=disk.sync)}),
        (api_proc.sessions, {"time": time}),
        (protocol.journal, {"threading": threads, "time": time}),
    ]


def _clock(world: World) -> types.SimpleNamespace:
    """In place of `time`."""

    def sleep(seconds: float) -> None:
        assert world.current is not None
        world.current.sleep(seconds)

    return types.SimpleNamespace(
        monotonic=world.seconds,
        perf_counter=world.seconds,
        monotonic_ns=world.nanoseconds,
        perf_counter_ns=world.nanoseconds,
        time=lambda: _WALL_CLOCK + world.seconds(),
        sleep=sleep,
    )


def _system(world: World) -> types.SimpleNamespace:
    """In place of `os`."""

    def pid() -> int:
        assert world.current is not None
        return world.current.pid

    def pidfd_open(pid: int) -> int:
        fd = world.open_pidfd(pid)
        if fd is None:
            raise ProcessLookupError(pid)
        return fd

    return types.SimpleNamespace(getpid=pid, pidfd_open=pidfd_open, close=lambda fd: None)


def _signals(world: World) -> types.SimpleNamespace:
    """In place of `signal`: the core has reason to kill nobody."""

    def send_signal(pidfd: int, number: int) -> None:
        process, sender = world.process_of(pidfd), world.current
        assert process is not None
        assert sender is not None
        assert number == signal.SIGKILL
        world.counts["killed by core"] += 1
        raise Violation(f"misbehaved: {sender.name} kills {process.name}")

    return types.SimpleNamespace(SIGKILL=signal.SIGKILL, pidfd_send_signal=send_signal)


def _failpoints(world: World, wire: Wire) -> Callable[..., None]:
    """In place of `reach`; the wire's rate ends with the faults."""

    def failpoint(name: str, when: bool = True) -> None:
        rate = wire.failpoint_rate
        if rate and when and world.current is not None and world.random() < rate:
            world.counts[f"kill at {name}"] += 1
            raise KilledHere

    return reach if wire.failpoint_rate else _pass_by


@contextlib.contextmanager
def stand_ins(
    world: World,
    wire: Wire,
    start_child: Callable[..., Any],
    start_zygote: Callable[..., Any],
    disk: Disk | None = None,
) -> Iterator[None]:
    """Let the modules of the loops see the simulated world.

    Whether anybody can be killed at a failpoint is settled by the wire's rate as it is now.

    Args:
        world: clock, processes, random numbers.
        wire: what sockets are connected by.
        start_child: stands for `protocol.child_handle.Child` where the supervisor starts a process.
        start_zygote: stands for `protocol.forked_child.ForkServer`.
        disk: what the journal is written to, where there is one.
    """

    def context() -> SimulatedContext:
        assert world.current is not None
        return SimulatedContext(wire, world.current)

    time, system = _clock(world), _system(world)
    sockets = _plain_zmq()
    sockets.Context = context
    sockets.Poller = lambda: SimulatedPoller(world)
    secrets = types.SimpleNamespace(token_bytes=world.rng.randbytes)
    places: list[tuple[types.ModuleType, dict[str, Any]]] = [
        (core_proc.loop, {"zmq": sockets, "time": time}),
        (core_proc.pidfd_monitor, {"os": system, "signal": _signals(world)}),
        (protocol.channel, {"secrets": secrets, "zmq": sockets, "Path": _NoFile}),
        (protocol.client, {"time": time}),
        (protocol.core_link, {"zmq": sockets, "os": system}),
        (protocol.multipart, {"receive": receive, "send": send}),
        (protocol.progress, {"time": time}),
        (protocol.supervisor_link, {"time": time}),
        (scripts.supervisor.forks, {"ForkServer": start_zygote, "reap_strangers": _reap_nobody}),
        (scripts.supervisor.process_table, {"Child": start_child}),
        (
            scripts.supervisor.supervisor,
            {"zmq": sockets, "time": time, "random": _OneRandom(world), "OomCounter": _NoCounter},
        ),
        (worker_proc.loop, {"zmq": sockets, "time": time, "os": system}),
        (worker_proc.null_runner, {"time": time}),
    ]
    if disk is not None:
        places += _journal_places(disk, time)
    reach = _failpoints(world, wire)
    places += [(module, {"reach": reach}) for module in FAILPOINT_MODULES]
    before = [(module, {name: vars(module)[name] for name in names}) for module, names in places]
    try:
        for module, names in places:
            vars(module).update(names)
        yield
    finally:
        for module, names in before:
            vars(module).update(names)
