"""The supervisor: the real Supervisor with its process table, and processes that are simulated."""

from collections.abc import Sequence
from itertools import count
from typing import Any, cast

from protocol.config import EngineConfig
from protocol.lifecycle import Progress, Ready, Role
from scripts.simulation.children import ROLES, Bear, Birth, SimulatedForkServer, SimulatedProcess
from scripts.simulation.sockets import SimulatedSocket
from scripts.simulation.stand_ins import RUN_DIR, Incarnation
from scripts.simulation.wire import Wire
from scripts.simulation.world import Process, Violation
from scripts.supervisor.actions import Slot
from scripts.supervisor.console import Console
from scripts.supervisor.loop import Supervisor
from scripts.supervisor.run_dirs import RunDir


class SilentConsole:
    """A `Console` that nobody reads."""

    def note(self, severity: int, text: str) -> None:
        """A line for the log."""

    def line(self, text: str) -> None:
        """A line."""

    def starting(self, slot: Slot, now: float) -> None:
        """A start begins."""

    def progress(self, slot: Slot, message: Progress, now: float) -> None:
        """A start goes on."""

    def ready(self, slot: Slot, message: Ready, now: float) -> None:
        """A start is over."""

    def ended(self, slot: Slot) -> None:
        """A process has ended."""

    def tick(self, now: float) -> None:
        """Nothing is drawn."""

    def next_tick(self) -> None:
        """Never."""


class Listener:
    """The socket for HTTP, which nobody connects to."""

    def fileno(self) -> int:
        """A number that the API process gets."""
        return -1

    def getsockname(self) -> tuple[str, int]:
        """Where it listens."""
        return "127.0.0.1", 0


class EpochSource:
    """As much of a `RunDir` as the supervisor uses."""

    def __init__(self) -> None:
        """Epochs count from 1."""
        self.path = RUN_DIR
        self.next_epoch = count(1).__next__


class SupervisorProcess(Process):
    """Turns the real Supervisor."""

    def __init__(self, wire: Wire, config: EngineConfig, bear: Bear) -> None:
        """Nothing is started before the first turn; `bear` starts processes."""
        super().__init__(wire.world, "supervisor")
        self._config = config
        self._bear = bear
        self._supervisor: Supervisor | None = None
        self._asked: list[Role] = []
        self._is_told_to_end = self._is_ending = False
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
        if self._is_told_to_end and not self._is_ending:
            self._is_ending = True
            supervisor._perform(supervisor.policy.on_signal(now))
        supervisor.turn(ready)
        if supervisor._exit_status is not None:
            if not self._is_told_to_end or supervisor._exit_status:
                raise Violation(f"gave up: {supervisor.policy.failure}")
            self.world.at(self.busy_until, self.die, 0)
            return None
        poll_ms = supervisor._poll_ms()
        if self._inbox:
            return self.busy_until
        return self.busy_until + poll_ms * 1000

    @property
    def who_is_missing(self) -> str | None:
        """A process that does not serve yet, or does not wait yet in reserve; None: nobody."""
        if self._supervisor is None:
            return "supervisor"
        processes = self._supervisor.policy.processes
        return next((str(process.slot) for process in processes if not process.serves), None)

    def restart(self, role: Role) -> None:
        """Somebody asks for a planned restart."""
        self._asked.append(role)
        self.wake()

    def end(self) -> None:
        """Somebody sends SIGTERM."""
        self._is_told_to_end = True
        self.wake()

    def _make(self) -> Supervisor:
        supervisor = Supervisor(
            self._config,
            cast(RunDir, EpochSource()),
            cast(Console, SilentConsole()),
            listener=cast(Any, Listener()),
            parent_fd=None,
            started_at=self.world.seconds(),
        )
        self._inbox = cast(SimulatedSocket, supervisor._link.socket).inbox
        self.on_death.append(supervisor._pages.close)
        return supervisor

    # What stands for `Child` and `ForkServer` -----------------------------------------------------

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
        birth = Birth(life, is_standby="--standby" in arguments)
        return SimulatedProcess(self._bear(birth), epoch)

    def start_zygote(
        self, config: EngineConfig, epoch: int, progress_fd: int | None = None
    ) -> SimulatedForkServer:
        """Start a zygote."""
        return SimulatedForkServer(config, epoch, progress_fd, self._bear)
