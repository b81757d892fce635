"""What the supervisor finds where it expects to start processes: by command, or by a zygote."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocol.child_runtime import EXIT_ORPHANED
from protocol.config import EngineConfig
from protocol.lifecycle import Fatal, Progress, Ready, Role
from protocol.message import ProtocolError
from protocol.progress import ProgressReporter
from protocol.zygote_link import Forked, ForkFailed
from scripts.simulation.stand_ins import Incarnation
from scripts.simulation.world import SECOND, Process, Violation, World

ROLES = {"api_proc": Role.API, "core_proc": Role.CORE, "worker_proc": Role.WORKER}
"""By the name of the program."""
_FORK_S = (0.0005, 0.005)
_PACKET_S = (0.00002, 0.0002)
_ORPHANED_S = 0.001


@dataclass(frozen=True)
class Birth:
    """What is to be started."""

    life: Incarnation
    is_standby: bool = False
    is_forked: bool = False


Bear = Callable[[Birth], Process]


class SimulatedProcess:
    """A `protocol.child_handle.Child`: one process as its parent sees it."""

    def __init__(self, process: Process, epoch: int) -> None:
        """Watch a process; the parent is whose code runs."""
        self.pidfd = process.world.watch(process)
        self.pid = process.pid
        self.epoch = epoch
        self.process = process

    def poll(self) -> int | None:
        """How it ended; None while it runs."""
        return self.process.status

    def kill(self) -> None:
        """SIGKILL.

        Raises:
            Violation: whoever is to be killed is well.
        """
        world, process = self.process.world, self.process
        if process.is_alive:
            is_excused = process.is_stopped or process.is_dispensable or world.is_ending
            if world.excuse is None and not is_excused:
                raise Violation(f"false kill: {process.name} is well")
            if not world.is_ending:
                world.counts[f"killed by supervisor: {process.role}"] += 1
            world.at(world.local_time, process.die)

    def dump_stacks(self) -> None:
        """Nobody reads them here."""

    def close(self) -> None:
        """The end of the parent's pipe: whoever is left behind it ends."""


class Zygote(Process):
    """Loads, then forks workers on request, one after the other."""

    def __init__(self, world: World, life: Incarnation, start_s: float, bear: Bear) -> None:
        super().__init__(world, f"zygote.{life.epoch}")
        self._life = life
        self._bear = bear
        self._ready_at = world.now + int(start_s * SECOND)
        self._is_ready = False
        self._reporter = ProgressReporter(life.page_fd, life.epoch, life.config.recovery)
        if self._reporter.page is not None:
            self.on_death.append(self._reporter.page.close)
        self._orders: list[Birth] = []
        self.born: dict[int, Process] = {}
        """By epoch."""
        self._given_up: set[int] = set()
        self.told: list[Ready | Forked] = []
        """What its supervisor can read."""
        self.supervisor: Process | None = None
        self.wake(self._ready_at)

    def order(self, birth: Birth) -> None:
        """A request to fork has arrived."""
        if self.is_alive:
            self._orders.append(birth)
            self.wake()

    def turn(self) -> int | None:
        if not self._is_ready:
            if self.world.now < self._ready_at:
                return self._ready_at
            self._is_ready = True
            self._tell(Ready())
        self._reporter.turn()
        orders, self._orders = self._orders, []
        for birth in orders:
            self.busy_until += self.world.between(*_FORK_S)
            self._fork(birth)
        self._reporter.idle()
        tick_ms = self._reporter.tick_ms
        return None if tick_ms is None else self.busy_until + tick_ms * 1000

    def _fork(self, birth: Birth) -> None:
        epoch = birth.life.epoch
        child = self.born[epoch] = self._bear(birth)
        if epoch in self._given_up:
            self.give_up(epoch)
        self._tell(Forked(epoch, child.pid))

    def give_up(self, epoch: int) -> None:
        """Nobody is at the other end of a worker's pipe: it ends as soon as it is there."""
        self._given_up.add(epoch)
        if epoch in self.born:
            self.world.at(
                self.world.local_time + int(_ORPHANED_S * SECOND),
                self.born[epoch].die,
                EXIT_ORPHANED,
            )

    def _tell(self, message: Ready | Forked) -> None:
        """A packet that has left arrives, whatever becomes of its sender."""
        self.world.at(self.busy_until + self.world.between(*_PACKET_S), self._arrive, message)

    def _arrive(self, message: Ready | Forked) -> None:
        self.told.append(message)
        if self.supervisor is not None:
            self.supervisor.wake()


class SimulatedForkServer:
    """A `protocol.forked_child.ForkServer`: the zygote, and the workers it was asked for."""

    def __init__(
        self, config: EngineConfig, epoch: int, progress_fd: int | None, bear: Bear
    ) -> None:
        """Start the zygote."""
        life = Incarnation(Role.ZYGOTE, 0, epoch, config, progress_fd)
        zygote = bear(Birth(life))
        assert isinstance(zygote, Zygote)
        self._zygote = zygote
        self._world = zygote.world
        zygote.supervisor = self._world.current
        self._config = config
        self._asked: dict[int, None] = {}
        self.link = object()
        """To poll: here the zygote wakes its supervisor."""
        self.child = SimulatedProcess(zygote, epoch)

    @property
    def asked(self) -> list[int]:
        """Epochs of workers that are not there yet."""
        return list(self._asked)

    def fork(self, epoch: int, rank: int, progress_fd: int | None, *, is_standby: bool) -> None:
        """Ask for a worker; `Forked` follows, or the end of the zygote."""
        if not self._zygote.is_alive:
            raise OSError("the zygote is gone")
        life = Incarnation(Role.WORKER, rank, epoch, self._config, progress_fd)
        birth = Birth(life, is_standby, is_forked=True)
        arrival = self._world.local_time + self._world.between(*_PACKET_S)
        self._world.at(arrival, self._zygote.order, birth)
        self._asked[epoch] = None

    def receive(self) -> list[Progress | Ready | Fatal | Forked | ForkFailed]:
        """What the zygote has said since, in order."""
        messages: list[Any] = list(self._zygote.told)
        self._zygote.told.clear()
        return messages

    def claim(self, forked: Forked) -> SimulatedProcess:
        """Take over a worker that was asked for."""
        if forked.epoch not in self._asked:
            raise ProtocolError("it was given up")
        del self._asked[forked.epoch]
        return SimulatedProcess(self._zygote.born[forked.epoch], forked.epoch)

    def disown(self, epoch: int) -> bool:
        """Give up a worker that was asked for: if it comes to life after all, it ends."""
        if epoch not in self._asked:
            return False
        del self._asked[epoch]
        self._zygote.give_up(epoch)
        return True

    def close(self) -> None:
        """After the end of the zygote."""
        for epoch in self.asked:
            self.disown(epoch)
