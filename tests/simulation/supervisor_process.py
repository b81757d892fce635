"""The supervisor process: the real Supervisor and process table, with simulated processes."""

from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

from protocol.config import EngineConfig
from protocol.lifecycle import Role
from scripts.supervisor.console import Console
from scripts.supervisor.invocation import Invocation
from scripts.supervisor.loop import Supervisor
from scripts.supervisor.run_dirs import RunDir
from scripts.supervisor.system import OomCounter, System
from tests.simulation.child import RUN_DIR, Incarnation
from tests.simulation.children import (
    ROLES,
    SimulatedForkServer,
    SimulatedProcess,
    StartOrder,
    StartProcess,
)
from tests.simulation.patched_os import SimulatedPoller
from tests.simulation.sockets import SimulatedSocket, make_context
from tests.simulation.wire import Wire
from tests.simulation.world import Process, Violation


class SilentConsole:
    """A `Console` that writes nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_: None


class Listener:
    """The listening socket for HTTP; no client connects to it."""

    def fileno(self) -> int:
        return -1

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", 0


class EpochSource:
    """As much of a `RunDir` as the supervisor uses."""

    def __init__(self, path: str = RUN_DIR) -> None:
        self.path = path
        self.next_epoch = count(1).__next__


class SupervisorProcess(Process):
    """Runs the turns of the real Supervisor."""

    def __init__(
        self,
        wire: Wire,
        config: EngineConfig,
        start_process: StartProcess,
        epochs: EpochSource | None = None,
        *,
        has_api: bool = True,
    ) -> None:
        """Start nothing before the first turn; `start_process` starts the processes.

        `epochs` are those of a predecessor, if there was one.
        """
        super().__init__(wire.world, "supervisor")
        self._wire = wire
        self._config = config
        self._start_process = start_process
        self._epochs = EpochSource() if epochs is None else epochs
        self._has_api = has_api
        self._supervisor: Supervisor | None = None
        self._asked: list[Role] = []
        self._must_end = self._is_ending = False
        self.wake()

    def turn(self) -> int | None:
        try:
            return self._turn()
        except Violation:
            raise
        except Exception as error:
            raise Violation(f"supervisor raised {type(error).__name__}: {error}") from error

    def _turn(self) -> int | None:
        supervisor, now = self._supervisor, self.world.seconds()
        if supervisor is None:
            supervisor = self._supervisor = self._make()
            supervisor._perform(supervisor.policy.begin(now))
        ready: dict[Any, int] = dict(supervisor._poller.poll(0))
        supervisor.policy.on_turn(now)
        asked, self._asked = self._asked, []
        for role in asked:
            supervisor._perform(supervisor.policy.on_restart(role, now)[1])
        if self._must_end and not self._is_ending:
            self._is_ending = True
            supervisor._perform(supervisor.policy.on_signal(now))
        supervisor.turn(ready)
        if supervisor._exit_status is not None:
            if not self._must_end or supervisor._exit_status:
                raise Violation(f"gave up: {supervisor.policy.failure}")
            self.world.at(self.busy_until, self.die, 0)
            return None
        poll_ms = supervisor._poll_ms()
        if self._inbox:
            return self.busy_until
        return self.busy_until + poll_ms * 1000

    @property
    def missing_process(self) -> str | None:
        """Name a process that is not ready, or a standby that does not wait yet; None: all are."""
        if self._supervisor is None:
            return "supervisor"
        processes = self._supervisor.policy.processes
        return next((str(process.slot) for process in processes if not process.serves), None)

    def restart(self, role: Role) -> None:
        """Request a planned restart."""
        self._asked.append(role)
        self.wake()

    def end(self) -> None:
        """Send SIGTERM."""
        self._must_end = True
        self.wake()

    def _make(self) -> Supervisor:
        supervisor = Supervisor(
            self._config,
            cast(RunDir, self._epochs),
            Invocation(
                cast(Console, SilentConsole()),
                signal_fd=-1,  # signals are events of the world
                started_at=self.world.seconds(),
                has_api=self._has_api,
                has_bars=False,
            ),
            listener=cast(Any, Listener()) if self._has_api else None,
            system=self._system(),
        )
        self._inbox = cast(SimulatedSocket, supervisor._link.socket).inbox
        self.on_death.append(supervisor._table.close)
        return supervisor

    def _system(self) -> System:
        world = self.world
        return System(
            clock=world.clock,
            make_poller=lambda: SimulatedPoller(world),
            make_context=lambda: make_context(self._wire, self),
            make_rng=lambda: world.rng,
            make_oom_counter=lambda: OomCounter(proc=Path("/nonexistent")),
            start_child=cast(Any, self.start_child),
            start_fork_server=cast(Any, self.start_zygote),
            reap_unknown_children=lambda known: None,
        )

    # In place of `Child` and `ForkServer` ---------------------------------------------------------

    def start_child(
        self,
        program: str,
        config: EngineConfig,
        *,
        epoch: int,
        rank: int = 0,
        progress_fd: int | None = None,
        arguments: Sequence[str] = (),
        **_: object,
    ) -> SimulatedProcess:
        """Start a process by command."""
        life = Incarnation(ROLES[program], rank, epoch, config, progress_fd)
        order = StartOrder(life, is_standby="--standby" in arguments)
        return SimulatedProcess(self._start_process(order), epoch)

    def start_zygote(
        self, config: EngineConfig, epoch: int, progress_fd: int | None = None, *, rank: int = 0
    ) -> SimulatedForkServer:
        """Start a zygote."""
        return SimulatedForkServer(config, epoch, progress_fd, rank, self._start_process)
