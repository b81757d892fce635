"""Runs one seed from start to end."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from protocol.adapters import Adapter
from protocol.lifecycle import Role
from tests.simulation.adapters import LoadWatch
from tests.simulation.api_process import ApiProcess
from tests.simulation.child import Incarnation, SimulatedChild
from tests.simulation.children import StartOrder, Zygote
from tests.simulation.client_process import ClientProcess
from tests.simulation.disk import Disk
from tests.simulation.engine_processes import CoreProcess, WorkerProcess, facts_of
from tests.simulation.http_clients import Internet
from tests.simulation.oracle import Oracle
from tests.simulation.patched_os import patched_failpoints
from tests.simulation.pausing import Operator
from tests.simulation.plan import (
    FAULTS,
    VOCAB_SIZE,
    EndPlan,
    FaultEvent,
    JournalPlan,
    Plan,
    RequestPlan,
    make_plan,
)
from tests.simulation.supervisor_process import SupervisorProcess
from tests.simulation.wire import Wire
from tests.simulation.world import SECOND, START_TIME, Process, Violation, World

PROGRESS_BOUND_S = 30.0
"""After the last fault, every accepted request must end within this time."""
SAFETY_EXTRA_S = 4.0
"""A run in safety mode continues for this long after the last submission."""
_IDLE_BOUND_S = 20
"""All streams have ended: the core must be empty and every process ready within this time."""


_END_BOUND_S = 10
"""Nothing is open any more: every process of the engine must have ended within this time."""
_LATEST_DEATH_S = 0.2
"""After the request to end."""
_SLICE = SECOND // 10


@dataclass
class Outcome:
    """The result of one seed."""

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
    """A world with an engine, its clients, and the faults of a plan."""

    def __init__(self, seed: int, plan: Plan, mode: str) -> None:
        self.world = World(seed)
        self.wire = Wire(self.world)
        self.wire.failpoint_rate = plan.failpoint_rate
        self._plan = plan
        self._mode = mode
        self._facts = facts_of(plan.config, VOCAB_SIZE, plan.num_host_blocks)
        self._loads = None if plan.adapters is None else LoadWatch(self.world, plan.adapters)
        self.oracle = Oracle(self.world, self._facts, self._on_change, self._loads)
        self._clients: list[ClientProcess] = []
        self._supervisor: SupervisorProcess | None = None
        journal = plan.journal
        self._disk: Disk | None = None
        if journal is not None:
            self._disk = Disk(self.world, journal.disk_rates, journal.stall_rate)
            self._internet = Internet(
                self.oracle, self._disk, journal.kill_after_answers, self._kill_api
            )
        self._http_plans = list(plan.requests[0])
        scheduler, num_stages = plan.config.scheduler, plan.config.parallel.pipeline_parallel_size
        num_steps = max(scheduler.max_steps_in_flight, num_stages)
        num_in_flight = num_steps * (1 + scheduler.num_speculative_tokens)
        self._operator = Operator(self.oracle, self._clients, num_in_flight)

    def run(self) -> None:
        """Run the plan.

        Raises:
            Violation: a property does not hold.
        """
        plan, world = self._plan, self.world
        self._supervisor = SupervisorProcess(self.wire, plan.config, self._start_process)
        with contextlib.closing(self), patched_failpoints(world, self.wire):
            for index, requests in enumerate(plan.requests[1:]):
                self._clients.append(
                    ClientProcess(self.wire, f"host{index}", requests, self.oracle)
                )
            if plan.journal is not None:
                self._send_over_http(plan.journal)
            for fault in plan.faults:
                world.at(START_TIME + int(fault.time_s * SECOND), self._inject, fault)
            for time_s, pause in plan.pauses:
                world.at(START_TIME + int(time_s * SECOND), self._operator.ask, pause)
            for time_s, adapter in () if plan.adapters is None else plan.adapters.loads:
                world.at(START_TIME + int(time_s * SECOND), self._load_adapter, adapter)
            self.wire.harm(plan.frame_rates)
            if plan.frame_rates:
                world.excuse = "frames are harmed"
            elif plan.config.parallel.num_ranks > 1:
                world.excuse = "ranks end together"
            if self._mode == "safety":
                self._run_for(plan.heal_at_s + SAFETY_EXTRA_S)
                return
            world.at(START_TIME + int(plan.heal_at_s * SECOND), self._heal)
            if plan.end is not None:
                end_s = plan.heal_at_s + plan.end.after_s
                world.at(START_TIME + int(end_s * SECOND), self._end_early, plan.end)
            self._run_for(plan.heal_at_s + PROGRESS_BOUND_S)
            self._check_progress()

    def _send_over_http(self, journal: JournalPlan) -> None:
        world, requests = self.world, self._plan.requests[0]
        for request in requests:
            world.at(START_TIME + int(request.time_s * SECOND), self._submit_over_http, request)
        for time_s in journal.disconnects:
            world.at(START_TIME + int(time_s * SECOND), self._disconnect)

    def _submit_over_http(self, request: RequestPlan) -> None:
        self._internet.submit(request)
        self._plan.requests[0].remove(request)

    def _disconnect(self) -> None:
        self.world.counts["disconnect"] += 1
        self._internet.break_one()

    def _load_adapter(self, adapter: Adapter) -> None:
        living = [client for client in self._clients if client.is_alive]
        if living:
            client = self.world.rng.choice(living)
            assert self._loads is not None
            client.run(self._loads.load(client.engine, adapter))

    def close(self) -> None:
        """Release all resources of the operating system."""
        for process in self.world.processes.values():
            process.is_alive = False
            process.release()
        if self._disk is not None:
            self._disk.close()

    def _run_for(self, seconds: float) -> None:
        self.world.run(START_TIME + int(seconds * SECOND))

    def _is_served(self) -> bool:
        """Return whether no stream is open and no request is still to be submitted."""
        return not self.oracle.num_open and not any(self._plan.requests)

    def _on_change(self) -> None:
        self.world.is_over = self._is_served()

    def _heal(self) -> None:
        self.world.trace("heal")
        self.wire.harm({})
        self.wire.failpoint_rate = 0.0
        for process in list(self.world.processes.values()):
            process.resume()
        if self._disk is not None:
            self._disk.heal()
        if self._plan.pauses:
            self._operator.resume_until_it_holds()

    def _check_progress(self) -> None:
        if not self._is_served():
            stuck = [f"{s.name} at {len(s.received)}" for s in self.oracle.open_streams]
            raise Violation(f"stuck: {', '.join(stuck) or 'requests were never accepted'}")
        self._heal()
        if not self.world.is_ending:
            self._wait_until_none(self._describe_rest, "leak", _IDLE_BOUND_S)
            self._end()
        self._wait_until_none(self._living_processes, "stays", _END_BOUND_S)

    def _wait_until_none(self, find: Callable[[], str | None], kind: str, bound_s: float) -> None:
        deadline = self.world.now + int(bound_s * SECOND)
        while (problem := find()) is not None:
            if self.world.now > deadline:
                raise Violation(f"{kind}: {problem}")
            self.world.run(self.world.now + _SLICE)

    def _end_early(self, plan: EndPlan) -> None:
        """Ask the engine to end once all requests are accepted, if one is still open then."""
        if any(self._plan.requests):
            self.world.after(_SLICE, self._end_early, plan)
        elif self.oracle.num_open:
            self._end()
            self._plan.start_s["worker"] = plan.load_s
            for victim in plan.victims:
                delay = self.world.between(0.0, _LATEST_DEATH_S)
                self.world.after(delay, self._inject, FaultEvent(0.0, "kill", victim))

    def _end(self) -> None:
        """Ask the engine to end."""
        self.world.is_ending = True
        self.world.counts["end" if self.oracle.num_open else "end at rest"] += 1
        assert self._supervisor is not None
        self._supervisor.end()

    def _living_processes(self) -> str | None:
        """Name the processes that are still alive after the end, hosts excluded."""
        processes = self.world.processes.values()
        living = [p.name for p in processes if p.is_alive and not p.name.startswith("host")]
        return ", ".join(living) or None

    def _describe_rest(self) -> str | None:
        cores = [p for p in self.world.processes.values() if isinstance(p, CoreProcess)]
        engines = [core.engine for core in cores if core.is_begun]
        problem = engines[0].check_idle() if engines else "no core runs"
        if problem is not None:
            return problem
        assert self._supervisor is not None
        missing = self._supervisor.missing_process
        return None if missing is None else f"{missing} is missing"

    # Processes ----------------------------------------------------------------------------------

    def _start_process(self, order: StartOrder) -> Process:
        plan, wire, life = self._plan, self.wire, order.life
        start_s = plan.start_s["fork"] if order.is_forked else plan.start_s[life.role]
        if life.role is Role.ZYGOTE:
            return Zygote(self.world, life, start_s, self._start_process)
        if life.role is Role.CORE:
            return CoreProcess(wire, life, start_s, loads=self._loads, is_standby=order.is_standby)
        if life.role is Role.WORKER:
            return WorkerProcess(
                wire,
                life,
                start_s,
                facts=self._facts,
                step_s=plan.step_s,
                num_draft_states=plan.num_draft_states,
                loads=self._loads,
                is_standby=order.is_standby,
            )
        client = self._new_api(life, start_s)
        client.is_dispensable = any(c.is_alive for c in self._clients if c.role == client.role)
        self._clients.append(client)
        return client

    def _new_api(self, life: Incarnation, start_s: float) -> ClientProcess:
        name, oracle, requests = f"api.{life.epoch}", self.oracle, self._plan.requests[0]

        def connect(process: Process) -> SimulatedChild:
            return SimulatedChild(self.wire, process, life)

        if self._disk is None:
            return ClientProcess(self.wire, name, requests, oracle, connect, start_s=start_s)
        return ApiProcess(
            self.wire,
            name,
            oracle,
            connect,
            start_s=start_s,
            internet=self._internet,
            plans=self._http_plans,
        )

    def _kill_api(self) -> None:
        apis = [client for client in self._clients if isinstance(client, ApiProcess)]
        for api in apis:
            if api.is_alive:
                self.world.counts["kill api"] += 1
                api.die()

    # Faults -------------------------------------------------------------------------------------

    def _inject(self, fault: FaultEvent) -> None:
        world = self.world
        if fault.kind in ("reset", "partition"):
            self._break_link(fault)
            return
        if fault.kind == "restart":
            world.counts[f"restart {fault.target}"] += 1
            assert self._supervisor is not None
            self._supervisor.restart(Role(fault.target))
            return
        if fault.kind == "stop":
            world.excuse = "processes are stopped"
        living = [p for p in world.processes.values() if p.name.startswith(fault.target)]
        if fault.target == "client":
            living = [p for p in self._clients if p.is_alive]
        if not living:
            return
        process = world.rng.choice(living)
        world.counts[f"{fault.kind} {process.role}"] += 1
        if fault.kind == "kill":
            process.die()
        else:
            process.stop()
            world.after(int(fault.seconds * SECOND), process.resume)

    def _break_link(self, fault: FaultEvent) -> None:
        mine = [c for c in self.wire.connections if fault.target in c.dealer.address]
        self.world.excuse = "connections break"
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
    return outcome_of(Simulation(seed, make_plan(seed, mode, kinds), mode), seed, keeps_trace)


class Runnable(Protocol):
    """A simulation that has not been run."""

    world: World
    oracle: Oracle

    def run(self) -> None:
        """Run it to its end; raises a Violation."""


def outcome_of(simulation: Runnable, seed: int, keeps_trace: bool) -> Outcome:
    """Run a simulation, and return what it has counted and found."""
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
        world.lines if keeps_trace else [],
        (world.now - START_TIME) / SECOND,
    )
