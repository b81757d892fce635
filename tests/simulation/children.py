"""The processes as the simulated supervisor sees them: started by command, or by a zygote."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from protocol.config import EngineConfig
from protocol.lifecycle import Fatal, Progress, Ready, Role
from protocol.message import ProtocolError
from protocol.process.child_runtime import EXIT_ORPHANED
from protocol.process.progress import ProgressReporter
from protocol.process.zygote_link import Forked, ForkFailed
from tests.simulation.child import Incarnation
from tests.simulation.world import SECOND, Process, Violation, World

ROLES = {"api_proc": Role.API, "core_proc": Role.CORE, "worker_proc": Role.WORKER}
"""The role of each program."""
_FORK_S = (0.0005, 0.005)
_PACKET_S = (0.00002, 0.0002)
_ORPHANED_S = 0.001


@dataclass(frozen=True)
class StartOrder:
    """The arguments of a start."""

    life: Incarnation
    is_standby: bool = False
    is_forked: bool = False


StartProcess = Callable[[StartOrder], Process]


class SimulatedProcess:
    """A `protocol.process.child_handle.Child`: a process as its parent sees it."""

    def __init__(self, process: Process, epoch: int) -> None:
        """Watch a process for the process whose code runs."""
        self.pidfd = process.world.watch(process)
        self.pid = process.pid
        self.epoch = epoch
        self.process = process

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""
        return self.process.status

    def kill(self) -> None:
        """Send SIGKILL.

        Raises:
            Violation: the process is healthy.
        """
        world, process = self.process.world, self.process
        if process.is_alive:
            is_excused = process.is_stopped or process.is_dispensable or world.is_ending
            if world.excuse is None and not is_excused:
                raise Violation(f"false kill: {process.name} is healthy")
            if not world.is_ending:
                world.counts[f"killed by supervisor: {process.role}"] += 1
            world.at(world.local_time, process.die)

    def dump_stacks(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing: a simulated process does not watch its parent's pipe."""


class Zygote(Process):
    """Loads, then forks the requested workers one after the other."""

    def __init__(
        self, world: World, life: Incarnation, start_s: float, start_process: StartProcess
    ) -> None:
        super().__init__(world, f"zygote.{life.epoch}")
        self._life = life
        self._start_process = start_process
        self._ready_at = world.now + int(start_s * SECOND)
        self._is_ready = False
        self._reporter = ProgressReporter(
            life.page_fd, life.epoch, life.config.recovery, clock=world.clock
        )
        if self._reporter.page is not None:
            self.on_death.append(self._reporter.page.close)
        self._orders: list[StartOrder] = []
        self.forked: dict[int, Process] = {}
        """By epoch."""
        self._disowned: set[int] = set()
        self.outbox: list[Ready | Forked] = []
        """Messages that its supervisor can read."""
        self.supervisor: Process | None = None
        self.wake(self._ready_at)

    def order(self, order: StartOrder) -> None:
        """Receive a request to fork."""
        if self.is_alive:
            self._orders.append(order)
            self.wake()

    def turn(self) -> int | None:
        if not self._is_ready:
            if self.world.now < self._ready_at:
                return self._ready_at
            self._is_ready = True
            self._send(Ready())
        self._reporter.turn()
        orders, self._orders = self._orders, []
        for order in orders:
            self.busy_until += self.world.between(*_FORK_S)
            self._fork(order)
        self._reporter.idle()
        tick_ms = self._reporter.tick_ms
        return None if tick_ms is None else self.busy_until + tick_ms * 1000

    def _fork(self, order: StartOrder) -> None:
        epoch = order.life.epoch
        child = self.forked[epoch] = self._start_process(order)
        if epoch in self._disowned:
            self.disown(epoch)
        self._send(Forked(epoch, child.pid))

    def disown(self, epoch: int) -> None:
        """Close the parent's end of a worker's pipe: the worker ends as soon as it runs."""
        self._disowned.add(epoch)
        if epoch in self.forked:
            self.world.at(
                self.world.local_time + int(_ORPHANED_S * SECOND),
                self.forked[epoch].die,
                EXIT_ORPHANED,
            )

    def _send(self, message: Ready | Forked) -> None:
        """Send a packet, which arrives even if its sender dies meanwhile."""
        self.world.at(self.busy_until + self.world.between(*_PACKET_S), self._arrive, message)

    def _arrive(self, message: Ready | Forked) -> None:
        self.outbox.append(message)
        if self.supervisor is not None:
            self.supervisor.wake()


class SimulatedForkServer:
    """A `protocol.process.fork_server.ForkServer`: the zygote and the workers requested from it."""

    def __init__(
        self,
        config: EngineConfig,
        epoch: int,
        progress_fd: int | None,
        rank: int,
        start_process: StartProcess,
    ) -> None:
        life = Incarnation(Role.ZYGOTE, rank, epoch, config, progress_fd)
        zygote = start_process(StartOrder(life))
        assert isinstance(zygote, Zygote)
        self._zygote = zygote
        self._rank = rank
        self._world = zygote.world
        zygote.supervisor = self._world.current
        self._config = config
        self._asked: dict[int, None] = {}
        self.link = object()
        """A placeholder to poll: the zygote wakes its supervisor instead."""
        self.child = SimulatedProcess(zygote, epoch)

    def fork(self, epoch: int, progress_fd: int | None, *, is_standby: bool) -> None:
        """Request a worker; `Forked` follows, or the death of the zygote."""
        if not self._zygote.is_alive:
            raise OSError("the zygote is gone")
        life = Incarnation(Role.WORKER, self._rank, epoch, self._config, progress_fd)
        order = StartOrder(life, is_standby, is_forked=True)
        arrival = self._world.local_time + self._world.between(*_PACKET_S)
        self._world.at(arrival, self._zygote.order, order)
        self._asked[epoch] = None

    def receive(self) -> list[Progress | Ready | Fatal | Forked | ForkFailed]:
        """Return the messages of the zygote in order."""
        messages: list[Any] = list(self._zygote.outbox)
        self._zygote.outbox.clear()
        return messages

    def claim(self, forked: Forked) -> SimulatedProcess:
        """Take over a forked worker."""
        if forked.epoch not in self._asked:
            raise ProtocolError("it was given up")
        del self._asked[forked.epoch]
        return SimulatedProcess(self._zygote.forked[forked.epoch], forked.epoch)

    def disown(self, epoch: int) -> bool:
        """Give up a requested worker: once forked, it ends."""
        if epoch not in self._asked:
            return False
        del self._asked[epoch]
        self._zygote.disown(epoch)
        return True

    def close(self) -> None:
        """Give up all requested workers; called after the zygote's death."""
        for epoch in list(self._asked):
            self.disown(epoch)
