"""One seed from beginning to end."""

import contextlib
from dataclasses import dataclass, field

from protocol.lifecycle import Role
from scripts.simulation.client_process import ClientProcess
from scripts.simulation.engine_processes import CoreProcess, WorkerProcess, facts_of
from scripts.simulation.oracle import Oracle
from scripts.simulation.plan import FAULTS, VOCAB_SIZE, FaultPlan, Plan, make_plan
from scripts.simulation.sockets import Wire
from scripts.simulation.stand_ins import Incarnation, SimulatedChild, stand_ins
from scripts.simulation.supervisor_process import SupervisorProcess
from scripts.simulation.world import SECOND, START_TIME, Process, Violation, World
from scripts.supervisor.supervised import Slot

PROGRESS_BOUND_S = 30.0
"""After the last fault everything accepted must have ended within so long."""
SAFETY_EXTRA_S = 4.0
"""In safety mode nothing need end; it is watched for so long after the last submission."""
_IDLE_BOUND_S = 12
"""And the core must have forgotten everything within so long again."""


_SLICE = SECOND // 100


@dataclass
class Outcome:
    """What came of one seed."""

    seed: int
    num_events: int
    num_streams: int
    num_tokens: int
    trace_hash: str
    counts: dict[str, int]
    violation: str | None = None
    lines: list[str] = field(default_factory=list)
    virtual_s: float = 0.0


class Simulation:
    """A world with an engine, its clients, and whatever is to happen to them."""

    def __init__(self, seed: int, plan: Plan, mode: str, *, keeps_trace: bool = False) -> None:
        self.world = World(seed, keeps_trace=keeps_trace)
        self.wire = Wire(self.world)
        self._plan = plan
        self._mode = mode
        self._facts = facts_of(plan.config, VOCAB_SIZE, plan.num_host_blocks)
        self.oracle = Oracle(self.world, self._facts, self._on_change)
        self._clients: list[ClientProcess] = []
        self._supervisor: SupervisorProcess | None = None

    def run(self) -> None:
        """Let everything happen.

        Raises:
            Violation: something did that must not.
        """
        plan, world = self._plan, self.world
        with stand_ins(world, self.wire), contextlib.closing(self):
            ranks = {Role.WORKER: plan.config.parallel.tensor_parallel_size, Role.CORE: 1}
            ranks[Role.API] = 1
            self._supervisor = SupervisorProcess(self.wire, plan.config, ranks, self._start)
            for index, requests in enumerate(plan.requests[1:]):
                self._clients.append(
                    ClientProcess(self.wire, f"host{index}", requests, self.oracle)
                )
            for fault in plan.faults:
                world.at(START_TIME + int(fault.time_s * SECOND), self._strike, fault)
            self.wire.rates = dict(plan.frame_rates)
            self.wire.failpoint_rate = plan.failpoint_rate
            if self._mode == "safety":
                self._run_for(plan.heal_at_s + SAFETY_EXTRA_S)
                return
            world.at(START_TIME + int(plan.heal_at_s * SECOND), self._heal)
            self._run_for(plan.heal_at_s + PROGRESS_BOUND_S)
            self._check_progress()

    def close(self) -> None:
        """Let go of everything that the system lends."""
        for process in list(self.world.processes.values()):
            process.die()

    def _run_for(self, seconds: float) -> None:
        self.world.run(START_TIME + int(seconds * SECOND))

    def _is_served(self) -> bool:
        """Nobody waits, and nobody will."""
        return not self.oracle.num_open and not any(self._plan.requests)

    def _on_change(self) -> None:
        self.world.is_over = self._is_served()

    def _heal(self) -> None:
        self.world.trace("heal")
        self.wire.rates = {}
        self.wire.failpoint_rate = 0.0
        for process in list(self.world.processes.values()):
            process.resume()

    def _check_progress(self) -> None:
        if not self._is_served():
            stuck = [f"{s.name} at {len(s.received)}" for s in self.oracle.open_streams]
            raise Violation(f"stuck: {', '.join(stuck) or 'requests were never accepted'}")
        self._heal()
        deadline = self.world.now + _IDLE_BOUND_S * SECOND
        while (problem := self._what_is_left()) is not None:
            if self.world.now > deadline:
                raise Violation(f"leak: {problem}")
            self.world.run(self.world.now + _SLICE)

    def _what_is_left(self) -> str | None:
        cores = [p for p in self.world.processes.values() if isinstance(p, CoreProcess)]
        engines = [core.engine for core in cores if core.is_begun]
        return engines[0].check_idle() if engines else "no core runs"

    # Processes ----------------------------------------------------------------------------------

    def _start(self, slot: Slot, epoch: int, page_fd: int | None) -> Process:
        plan, wire = self._plan, self.wire
        start_s = plan.start_s[slot.role]
        life = Incarnation(slot.role, slot.rank, epoch, plan.config, page_fd)
        if slot.role is Role.CORE:
            return CoreProcess(wire, life, start_s)
        if slot.role is Role.WORKER:
            return WorkerProcess(wire, life, start_s, facts=self._facts, step_s=plan.step_s)
        client = ClientProcess(
            wire,
            f"api.{epoch}",
            plan.requests[0],
            self.oracle,
            lambda process: SimulatedChild(wire, process, life),
        )
        self._clients.append(client)
        return client

    # Faults -------------------------------------------------------------------------------------

    def _strike(self, fault: FaultPlan) -> None:
        world = self.world
        if fault.kind in ("reset", "partition"):
            self._break_link(fault)
            return
        if fault.kind == "restart":
            world.counts[f"restart {fault.target}"] += 1
            assert self._supervisor is not None
            if self._supervisor.is_alive:
                self._supervisor.restart(Role(fault.target))
            return
        living = [p for p in world.processes.values() if p.name.startswith(fault.target)]
        if fault.target == "client":
            living = [p for p in self._clients if p.is_alive]
        if not living:
            return
        process = world.rng.choice(living)
        role = process.name.rstrip("0123456789.")
        if fault.kind == "kill":
            world.counts[f"kill {role}"] += 1
            process.die()
        else:
            world.counts[f"stop {role}"] += 1
            process.stop()
            world.after(int(fault.seconds * SECOND), process.resume)

    def _break_link(self, fault: FaultPlan) -> None:
        mine = [c for c in self.wire.connections if fault.target in c.dealer.address]
        self.world.counts[fault.kind] += 1
        self.world.trace(f"{fault.kind} {fault.target}")
        if fault.kind == "partition":
            for address in {connection.dealer.address for connection in mine}:
                self.wire.partition(address, fault.seconds)
        elif mine:
            self.world.rng.choice(mine).lose()


def run_seed(
    seed: int, mode: str, kinds: frozenset[str] = frozenset(FAULTS), *, keeps_trace: bool = False
) -> Outcome:
    """Run one seed; a violation is part of the outcome."""
    simulation = Simulation(seed, make_plan(seed, mode, kinds), mode, keeps_trace=keeps_trace)
    violation = None
    try:
        simulation.run()
    except Violation as found:
        violation = str(found)
    world, streams = simulation.world, simulation.oracle.streams
    return Outcome(
        seed,
        world.num_events,
        len(streams),
        sum(len(stream.received) for stream in streams),
        world.trace_hash,
        dict(world.counts),
        violation,
        world.lines or [],
        (world.now - START_TIME) / SECOND,
    )
