"""Runs one seed of an engine with replicas, which are killed, drain, and return.

Each replica is a whole engine of the simulation without an API: the real supervisor, core and
workers. One host sends all requests, with the real client of all replicas. In a third of the seeds
one replica has another checkpoint, which computes other tokens.
"""

import contextlib
import random
from typing import Any

import msgspec

from protocol.client import ReplicatedClient, ReplicatedOptions
from protocol.config import LoraConfig, RoutingPolicy
from protocol.lifecycle import Role
from protocol.model_facts import ModelFacts
from protocol.process.run_dir import client_address
from tests.simulation.child import RUN_DIR
from tests.simulation.children import StartOrder, Zygote
from tests.simulation.client_process import ClientProcess
from tests.simulation.engine_processes import CoreProcess, WorkerProcess, facts_of
from tests.simulation.oracle import Oracle
from tests.simulation.patched_os import patched_failpoints
from tests.simulation.plan import VOCAB_SIZE, Plan, make_plan
from tests.simulation.simulation import PROGRESS_BOUND_S, Outcome, outcome_of, run_seed
from tests.simulation.supervisor_process import EpochSource, SupervisorProcess
from tests.simulation.wire import Wire
from tests.simulation.world import SECOND, START_TIME, Process, Violation, World

REPLICAS = "replicas"
"""The mode of these runs."""
_FAULTS = ("kill replica", "kill replica", "drain replica", "kill core", "kill worker", "restart")
_OTHER_CHECKPOINT = "7001"
_RETURNS_S = (0.1, 0.5, 2.0, 5.0)
_END_BOUND_S = 10
_SLICE = SECOND // 10


def _plan_of(seed: int) -> Plan:
    """Draw a plan without faults, journal and adapters."""
    plan = make_plan(seed, "progress", frozenset())
    plan.journal = plan.adapters = None
    for requests in plan.requests:
        for request in requests:
            request.adapter = None
    plan.step_s = random.Random(seed).choice((0.005, 0.02, 0.06))
    api = msgspec.structs.replace(plan.config.api, journal_dir=None, journal_sync=False)
    plan.config = msgspec.structs.replace(plan.config, api=api, lora=LoraConfig())
    return plan


class SimulatedReplica:
    """The supervisor of one replica, its successors, and their processes."""

    def __init__(self, wire: Wire, plan: Plan, number: int, facts: ModelFacts) -> None:
        self.number = number
        path = f"{RUN_DIR}/{number}"
        self.address = client_address(path)
        run = msgspec.structs.replace(plan.config.run, run_dir=path)
        self._config = msgspec.structs.replace(plan.config, run=run)
        self._facts = facts
        self._plan = plan
        self._wire = wire
        self._epochs = EpochSource(path)
        self._processes: list[Process] = []
        self.start()

    @property
    def is_alive(self) -> bool:
        return self.supervisor.is_alive

    def start(self) -> None:
        """Start the supervisor, or its successor."""
        self.supervisor = SupervisorProcess(
            self._wire, self._config, self._start_process, self._epochs, has_api=False
        )

    def living(self, name: str = "") -> list[Process]:
        """Return its processes by the beginning of their names."""
        mine = [self.supervisor, *self._processes]
        return [process for process in mine if process.is_alive and process.name.startswith(name)]

    def _start_process(self, order: StartOrder) -> Process:
        process = self._make(order)
        self._processes.append(process)
        return process

    def _make(self, order: StartOrder) -> Process:
        plan, wire, life = self._plan, self._wire, order.life
        start_s = plan.start_s["fork"] if order.is_forked else plan.start_s[life.role]
        if life.role is Role.ZYGOTE:
            return Zygote(wire.world, life, start_s, self._start_process)
        if life.role is Role.CORE:
            return CoreProcess(wire, life, start_s, loads=None, is_standby=order.is_standby)
        return WorkerProcess(
            wire,
            life,
            start_s,
            facts=self._facts,
            step_s=plan.step_s,
            loads=None,
            num_draft_states=plan.num_draft_states,
            is_standby=order.is_standby,
        )


class ReplicaSimulation:
    """A world with replicas, a host, and the faults that a seed draws."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self._wire = Wire(self.world)
        self._rng = random.Random(f"replicas {seed}")
        self._plan = plan = _plan_of(seed)
        self._requests = [request for requests in plan.requests for request in requests]
        facts = facts_of(plan.config, VOCAB_SIZE, plan.num_host_blocks)
        other = msgspec.structs.replace(facts, checkpoint=_OTHER_CHECKPOINT)
        num_others = self._rng.choice((0, 0, 1))
        num_equal = self._rng.choice((2, 2, 3, 4)) - num_others
        self._facts = [facts] * num_equal + [other] * num_others
        self.oracle = Oracle(self.world, facts, self._on_change, others=[other][:num_others])
        self._replicas: list[SimulatedReplica] = []

    def run(self) -> None:
        """Run the plan, and then end everything.

        Raises:
            Violation: a property does not hold.
        """
        rng, world = self._rng, self.world
        world.excuse = "replicas end"
        with contextlib.closing(self), patched_failpoints(world, self._wire):
            self._replicas += [
                SimulatedReplica(self._wire, self._plan, number, facts)
                for number, facts in enumerate(self._facts)
            ]
            self._start_host()
            end_s = self._plan.heal_at_s
            for _ in range(rng.choice((1, 2, 3, 5))):
                kind, replica = rng.choice(_FAULTS), rng.choice(self._replicas)
                at = START_TIME + int(self._draw_time() * SECOND)
                world.at(at, self._inject, kind, replica)
            world.run(START_TIME + int((end_s + PROGRESS_BOUND_S) * SECOND))
            if not self._is_served():
                stuck = [f"{s.name} at {len(s.received)}" for s in self.oracle.open_streams]
                raise Violation(f"stuck: {', '.join(stuck) or 'requests were never accepted'}")
            self._end()

    def _draw_time(self) -> float:
        """Draw a time at which requests mostly run."""
        start_s, rng = self._plan.start_s, self._rng
        ready_s = start_s["core"] + max(start_s["worker"], start_s["zygote"])
        begun_s = max(ready_s, rng.choice(self._requests).time_s)
        return begun_s + rng.uniform(-0.1, 16 * self._plan.step_s)

    def close(self) -> None:
        """Release all resources of the operating system."""
        for process in self.world.processes.values():
            process.is_alive = False
            process.release()

    def _start_host(self) -> None:
        policy = self._rng.choice(list(RoutingPolicy))
        addresses = [replica.address for replica in self._replicas]

        def make_engine(**options: Any) -> ReplicatedClient:
            distribution = ReplicatedOptions(policy=policy)
            return ReplicatedClient(addresses, distribution, rng=self._rng, **options)

        self._host = ClientProcess(
            self._wire, "host", self._requests, self.oracle, make_engine=make_engine
        )

    def _is_served(self) -> bool:
        return not self.oracle.num_open and not self._requests

    def _on_change(self) -> None:
        self.world.is_over = self._is_served()

    def _inject(self, kind: str, replica: SimulatedReplica) -> None:
        world = self.world
        if world.is_ending or not replica.is_alive:
            return
        world.counts[kind] += 1
        if kind == "kill replica":
            for process in replica.living():
                process.die()
            world.after(int(self._rng.choice(_RETURNS_S) * SECOND), self._return, replica)
        elif kind == "drain replica":
            replica.supervisor.end()
            world.after(int(self._rng.choice(_RETURNS_S) * SECOND), self._return, replica)
        elif kind == "restart":
            replica.supervisor.restart(Role.CORE)
        else:
            for process in replica.living(kind.removeprefix("kill "))[:1]:
                process.die()

    def _return(self, replica: SimulatedReplica) -> None:
        """Start a replica again once all its processes have ended."""
        if self.world.is_ending:
            return
        if replica.living():
            self.world.after(_SLICE, self._return, replica)
        else:
            self.world.counts["return"] += 1
            replica.start()

    def _end(self) -> None:
        """Ask all replicas to end, and wait until no process is left."""
        world = self.world
        world.is_ending = True
        world.counts["moved"] += self._num_moved
        for replica in self._replicas:
            if replica.is_alive:
                replica.supervisor.end()
        deadline = world.now + _END_BOUND_S * SECOND
        while living := [p.name for each in self._replicas for p in each.living()]:
            if world.now > deadline:
                raise Violation(f"stays: {', '.join(living)}")
            world.run(world.now + _SLICE)

    @property
    def _num_moved(self) -> int:
        assert isinstance(self._host.engine, ReplicatedClient)
        return self._host.engine.num_moved


def run_replica_seed(seed: int, *, keeps_trace: bool = False) -> Outcome:
    """Run one seed; a violation is part of the outcome."""
    return outcome_of(ReplicaSimulation(seed), seed, keeps_trace)


def run_any_seed(
    seed: int, mode: str, kinds: frozenset[str], *, keeps_trace: bool = False
) -> Outcome:
    """Run one seed of any mode; replicas have faults of their own, whatever the `kinds`."""
    if mode == REPLICAS:
        return run_replica_seed(seed, keeps_trace=keeps_trace)
    return run_seed(seed, mode, kinds, keeps_trace=keeps_trace)
