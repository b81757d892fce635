"""Ranks without standbys are forked by zygotes: kill -9 in every phase, under load."""

import os
import signal
from pathlib import Path

import pytest

from protocol.lifecycle import Role
from protocol.process.failpoints import VARIABLE, arm
from scripts.testing import LOAD_TIMEOUT_S, TIMEOUT_S, Engine, EngineFactory, eventually, is_alive
from tests.system.kills import begin, connected, requests_of
from tests.system.null_load import loaded
from tests.system.ranks.test_standby_ranks import ready_pids
from tests.system.successors import check_zombies
from worker_proc.native.build import build, compiler

pytestmark = pytest.mark.slow

NULL = ("--null-step-ms", "5")
NUM_TOKENS = 200
PLACE = "supervisor.after_death"


def is_forked(pid: int) -> bool:
    """Whether a zygote has forked the process, which then has the zygote's command line."""
    return "--zygote" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def wait_for_others(engine: Engine, before: list[int]) -> list[int]:
    """Wait for a whole group without any of the processes of the one before it."""

    def ask() -> list[int]:
        after = ready_pids(engine, Role.WORKER, len(before))
        return [] if {*after} & {*before} else after

    return eventually(ask, "another group takes its place", LOAD_TIMEOUT_S)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_group_is_forked_after_the_death_of_each_rank(
    start_engine: EngineFactory, num_ranks: int
) -> None:
    """Its zygotes and the core are the same processes as before."""
    engine = start_engine("--tensor-parallel-size", str(num_ranks), *NULL)
    zygotes, core = ready_pids(engine, Role.ZYGOTE, num_ranks), engine.pid(Role.CORE)
    load = loaded(engine, 300 * num_ranks)
    for rank in range(num_ranks):
        before = ready_pids(engine, Role.WORKER, num_ranks)
        os.kill(before[rank], signal.SIGKILL)
        assert all(map(is_forked, wait_for_others(engine, before)))
        assert not any(map(is_alive, before)), "no rank is left of the group"
    load.check()
    assert ready_pids(engine, Role.ZYGOTE, num_ranks) == zygotes
    assert engine.pid(Role.CORE) == core
    check_zombies(engine)


@pytest.mark.parametrize(
    "place", ["worker.load", "worker.after_load", "worker.after_adopt", "worker.before_step"]
)
def test_a_rank_dies_again_while_its_group_returns(
    start_engine: EngineFactory, tmp_path: Path, place: str
) -> None:
    """Another rank may not be forked yet by then: no zygote dies of that."""
    start_engine.environ[VARIABLE] = str(tmp_path)
    engine = start_engine("--tensor-parallel-size", "2", *NULL)
    zygotes = ready_pids(engine, Role.ZYGOTE)
    load = loaded(engine, 600)
    for rank in range(2):
        before = ready_pids(engine, Role.WORKER)
        arm(tmp_path, place, "kill9@1")
        os.kill(before[rank], signal.SIGKILL)
        eventually(lambda: not (tmp_path / place).exists(), "it dies again")
        wait_for_others(engine, before)
    load.check()
    assert ready_pids(engine, Role.ZYGOTE) == zygotes
    check_zombies(engine)


@pytest.mark.parametrize(
    "victims", ["zygote", "zygote and its rank", "another rank and the zygote"]
)
def test_a_dead_zygote_is_replaced_alone_and_ranks_are_forked_again(
    start_engine: EngineFactory, victims: str
) -> None:
    """It is replaced alone; then all ranks are forked again."""
    engine = start_engine("--tensor-parallel-size", "2", *NULL)
    load = loaded(engine, 600)
    for rank in range(2):
        zygotes, workers = (ready_pids(engine, role) for role in (Role.ZYGOTE, Role.WORKER))
        doomed = {
            "zygote": [zygotes[rank]],
            "zygote and its rank": [zygotes[rank], workers[rank]],
            "another rank and the zygote": [workers[1 - rank], zygotes[rank]],
        }[victims]
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        eventually(lambda d=doomed: not any(map(is_alive, d)), "they are dead")
        after = ready_pids(engine, Role.ZYGOTE)
        assert after[1 - rank] == zygotes[1 - rank]
        if victims == "zygote":
            assert ready_pids(engine, Role.WORKER) == workers
    load.check()
    before = ready_pids(engine, Role.WORKER)
    os.kill(before[1], signal.SIGKILL)
    assert all(map(is_forked, wait_for_others(engine, before)))
    check_zombies(engine)


def test_a_zygote_that_hangs_is_replaced_when_it_is_needed(start_engine: EngineFactory) -> None:
    """The rank that it does not fork takes the group along."""
    engine = start_engine("--tensor-parallel-size", "2", *NULL)
    zygotes, workers = (ready_pids(engine, role) for role in (Role.ZYGOTE, Role.WORKER))
    load = loaded(engine)
    os.kill(zygotes[1], signal.SIGSTOP)
    os.kill(workers[0], signal.SIGKILL)
    wait_for_others(engine, workers)
    load.check()
    assert ready_pids(engine, Role.ZYGOTE)[0] == zygotes[0]
    check_zombies(engine)


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("flag", ["--tensor-parallel-size", "--pipeline-parallel-size"])
def test_forked_ranks_have_the_tokens_of_ranks_that_loaded_by_themselves(
    start_engine: EngineFactory, tmp_path: Path, flag: str
) -> None:
    """The first group is forked. The zygotes die before the second one is, which has to load."""
    build()
    start_engine.environ[VARIABLE] = str(tmp_path)
    engine = start_engine(
        "--no-api", "--num-threads", "1", flag, "2", model="demo", timeout_s=LOAD_TIMEOUT_S
    )
    requests = requests_of(NUM_TOKENS)
    with connected(engine) as client:
        assert all(map(is_forked, ready_pids(engine, Role.WORKER)))
        alone = [client.submit(*request).result(TIMEOUT_S).token_ids for request in requests]
        zygotes, workers = (ready_pids(engine, role) for role in (Role.ZYGOTE, Role.WORKER))
        streams = begin(client, requests)
        arm(tmp_path, PLACE, "delay:500@1")
        os.kill(workers[0], signal.SIGKILL)
        eventually(lambda: not (tmp_path / PLACE).exists(), "the supervisor has seen the death")
        for pid in zygotes:
            os.kill(pid, signal.SIGKILL)
        assert not any(map(is_forked, wait_for_others(engine, workers)))
        assert [stream.result(LOAD_TIMEOUT_S).token_ids for stream in streams] == alone
