"""A standby group takes the place of a group of ranks: kill -9 of any rank, under load.

The engines have the null model, whose tokens are known.
"""

import os
import signal
from collections.abc import Sequence

import pytest

from protocol.lifecycle import ProcessState, Role
from scripts.testing import LOAD_TIMEOUT_S, Engine, EngineFactory, eventually, is_alive
from tests.system.null_load import loaded
from tests.system.recovery.test_restart import command
from tests.system.successors import check_zombies

NUM_RANKS = 2
FLAGS = ("--standby-workers", "1", "--null-step-ms", "5")


def ready_pids(engine: Engine, role: Role, num_ranks: int = NUM_RANKS) -> list[int]:
    """Wait until a whole group is ready; the pids of its ranks in order."""

    def ask() -> list[int]:
        reply = engine.status()
        rows = [] if reply is None else [row for row in reply.processes if row.role is role]
        pids = [row.pid for row in rows if row.state is ProcessState.READY and row.pid is not None]
        return pids if len(pids) == num_ranks and all(map(is_alive, pids)) else []

    return eventually(ask, f"all ranks of {role} are ready", LOAD_TIMEOUT_S)


def start_group(
    start_engine: EngineFactory, num_ranks: int = NUM_RANKS, flags: Sequence[str] = ()
) -> Engine:
    engine = start_engine("--tensor-parallel-size", str(num_ranks), *FLAGS, *flags)
    ready_pids(engine, Role.STANDBY, num_ranks)
    return engine


def test_a_standby_group_takes_the_place_of_a_group_after_the_death_of_each_rank(
    start_engine: EngineFactory,
) -> None:
    """The same processes become the workers, each on its CPU, and no token is lost."""
    own_cpus = sorted(os.sched_getaffinity(0))[:NUM_RANKS]
    has_cpus = len(own_cpus) == NUM_RANKS
    flags = ("--worker-cpus", ":".join(map(str, own_cpus))) if has_cpus else ()
    engine = start_group(start_engine, flags=flags)
    core = engine.pid(Role.CORE)
    load = loaded(engine, 400)
    for rank in range(NUM_RANKS):
        standbys, workers = (ready_pids(engine, role) for role in (Role.STANDBY, Role.WORKER))
        os.kill(workers[rank], signal.SIGKILL)
        eventually(lambda s=standbys: ready_pids(engine, Role.WORKER) == s, "they are promoted")
        assert not any(map(is_alive, workers)), "no rank is left of the group"
        if has_cpus:
            assert [os.sched_getaffinity(pid) for pid in standbys] == [{cpu} for cpu in own_cpus]
    load.check()
    ready_pids(engine, Role.STANDBY)
    assert engine.pid(Role.CORE) == core
    check_zombies(engine)


@pytest.mark.slow
def test_the_death_of_a_standby_replaces_its_group_only(start_engine: EngineFactory) -> None:
    engine = start_group(start_engine)
    workers, standbys = (ready_pids(engine, role) for role in (Role.WORKER, Role.STANDBY))
    load = loaded(engine)
    os.kill(standbys[1], signal.SIGKILL)
    eventually(lambda: not set(ready_pids(engine, Role.STANDBY)) & set(standbys), "others wait")
    load.check()
    assert ready_pids(engine, Role.WORKER) == workers
    check_zombies(engine)


@pytest.mark.slow
def test_a_planned_restart_of_a_group_ends_in_its_standbys(start_engine: EngineFactory) -> None:
    """The ranks end in any order; the engine needs no other load of the model."""
    engine = start_group(start_engine)
    standbys = ready_pids(engine, Role.STANDBY)
    load = loaded(engine)
    done = command(engine, "worker")
    assert done.returncode == 0, done.stderr
    assert ready_pids(engine, Role.WORKER) == standbys
    load.check()
    check_zombies(engine)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("victims", ["one", "all", "one of each group", "with the core"])
def test_groups_come_back_after_any_deaths_at_once(
    start_engine: EngineFactory, num_ranks: int, victims: str
) -> None:
    """Each rank dies in turn: the tokens are those of an undisturbed run."""
    engine = start_group(start_engine, num_ranks)
    load = loaded(engine, 300 * num_ranks)
    for rank in range(num_ranks):
        workers = ready_pids(engine, Role.WORKER, num_ranks)
        standbys = ready_pids(engine, Role.STANDBY, num_ranks)
        doomed = {
            "one": [workers[rank]],
            "all": [*workers[rank:], *workers[:rank]],
            "one of each group": [standbys[-rank], workers[rank]],
            "with the core": [workers[rank], engine.pid(Role.CORE)],
        }[victims]
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda d=workers: not any(map(is_alive, d)), "the group is dead")
    load.check()
    ready_pids(engine, Role.STANDBY, num_ranks)
    check_zombies(engine)
