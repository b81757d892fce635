"""A standby takes the dead worker's place: every death of worker, standby and zygote, under load.

The engines have the null model, whose tokens are known, and once the demo model.
"""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest

from protocol.lifecycle import ProcessState, ProcessStatus, Role
from scripts.testing import LOAD_TIMEOUT_S, TIMEOUT_S, Engine, EngineFactory, eventually, is_alive
from tests.system.null_load import Stream, loaded
from tests.system.shared_engines import EnginePool, SharedEngine
from tests.system.successors import check_zombies, find, kill_and_wait, pid_of, wait_for
from tests.timing import within

HELPERS = (Role.ZYGOTE, Role.STANDBY)
FLAGS = ("--standby-workers", "1", "--null-step-ms", "5")


def complete(engine: Engine, timeout_s: float = TIMEOUT_S) -> dict[Role, ProcessStatus]:
    """Wait until worker and helpers are ready."""
    roles = (Role.WORKER, *HELPERS)
    return {role: wait_for(engine, role, timeout_s=timeout_s) for role in roles}


def wait_for_tokens(streams: list[Stream], number: int) -> None:
    eventually(lambda: all(len(s.token_ids) >= number for s in streams), "tokens come")


@pytest.fixture
def standing(shared_engine: EnginePool) -> SharedEngine:
    """An engine of the null model with worker, standby and zygote."""
    started = shared_engine(*FLAGS)
    complete(started)
    return started


def test_an_engine_that_has_ended_is_not_waited_for(start_engine: EngineFactory) -> None:
    with pytest.raises(RuntimeError, match="unknown flag --no-such-flag"):
        wait_for(start_engine("--no-such-flag"), Role.WORKER)


def test_standby_becomes_the_worker(standing: Engine) -> None:
    """It is the same process under a new epoch; a new standby starts."""
    before = complete(standing)
    load = loaded(standing)
    os.kill(pid_of(before[Role.WORKER]), signal.SIGKILL)
    worker = wait_for(standing, Role.WORKER, before[Role.WORKER].epoch)
    assert worker.pid == before[Role.STANDBY].pid
    assert worker.epoch > before[Role.STANDBY].epoch
    standby = wait_for(standing, Role.STANDBY, worker.epoch)
    assert standby.pid != worker.pid
    load.check()
    check_zombies(standing)


@pytest.mark.parametrize(
    "victims",
    [
        [Role.STANDBY],
        [Role.ZYGOTE],
        [Role.WORKER, Role.STANDBY],
        [Role.STANDBY, Role.WORKER],
        [Role.ZYGOTE, Role.WORKER],
        [Role.WORKER, Role.ZYGOTE],
        [Role.WORKER, Role.STANDBY, Role.ZYGOTE],
        [Role.CORE, Role.WORKER],
        [Role.CORE, Role.STANDBY, Role.WORKER, Role.ZYGOTE],
    ],
    ids="+".join,
)
def test_dead_processes_are_replaced_and_no_token_is_lost(
    standing: Engine, victims: list[Role]
) -> None:
    """Processes die at once, in this order, under load; only they and a promoted standby change."""
    before = {role: wait_for(standing, role) for role in (*HELPERS, Role.WORKER, Role.CORE)}
    load = loaded(standing)
    kill_and_wait(standing, [before[role] for role in victims])
    load.check()
    after = complete(standing)
    if Role.ZYGOTE not in victims:
        assert after[Role.ZYGOTE].epoch == before[Role.ZYGOTE].epoch
    if Role.WORKER not in victims:
        assert after[Role.WORKER].pid == before[Role.WORKER].pid
    check_zombies(standing)


def test_three_deaths_within_ten_seconds(standing: Engine) -> None:
    """Each death is survived with the helpers that are ready by then."""
    load = loaded(standing, 600)
    for _ in range(3):
        worker = wait_for(standing, Role.WORKER)
        os.kill(pid_of(worker), signal.SIGKILL)
        wait_for(standing, Role.WORKER, worker.epoch)
    load.check()
    complete(standing)


def test_worker_does_without_helpers(standing: Engine) -> None:
    """While zygotes die at once the next worker loads by itself; helpers return later."""
    before = complete(standing)
    load = loaded(standing)
    for role in (Role.ZYGOTE, Role.STANDBY, Role.WORKER):
        os.kill(pid_of(before[role]), signal.SIGKILL)

    def replaced() -> ProcessStatus | None:
        rows = {role: find(standing, role) for role in (Role.ZYGOTE, Role.WORKER)}
        zygote, worker = rows[Role.ZYGOTE], rows[Role.WORKER]
        if zygote is not None and zygote.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(zygote.pid, signal.SIGKILL)
        if worker is None or worker.state is not ProcessState.READY:
            return None
        return worker if worker.epoch > before[Role.WORKER].epoch else None

    worker = eventually(replaced, "there is another worker")
    assert "--zygote" not in Path(f"/proc/{worker.pid}/cmdline").read_text().split("\0")
    load.check()
    complete(standing)


def test_zygote_that_hangs_is_replaced_when_it_is_needed(standing: Engine) -> None:
    """It does not answer a fork request; the worker does not wait for it for long."""
    before = complete(standing)
    os.kill(pid_of(before[Role.ZYGOTE]), signal.SIGSTOP)
    load = loaded(standing)
    for role in (Role.STANDBY, Role.WORKER):
        os.kill(pid_of(before[role]), signal.SIGKILL)
    wait_for(standing, Role.ZYGOTE, before[Role.ZYGOTE].epoch)
    load.check()
    complete(standing)
    check_zombies(standing)


def test_standby_that_hangs_is_replaced_when_it_is_needed(standing: Engine) -> None:
    """It does not take over; another worker does."""
    before = complete(standing)
    load = loaded(standing)
    os.kill(pid_of(before[Role.STANDBY]), signal.SIGSTOP)
    os.kill(pid_of(before[Role.WORKER]), signal.SIGKILL)
    load.check()
    after = complete(standing)
    assert after[Role.WORKER].pid != before[Role.STANDBY].pid
    check_zombies(standing)


def test_promoted_worker_is_watched_like_any_other(start_engine: EngineFactory) -> None:
    """It keeps its progress page: if it is stopped by SIGSTOP, it is detected and replaced."""
    engine = start_engine(*FLAGS, "--hang-timeout-s", "1")
    first = complete(engine)[Role.WORKER]
    os.kill(pid_of(first), signal.SIGKILL)
    promoted = wait_for(engine, Role.WORKER, first.epoch)
    complete(engine)
    load = loaded(engine)
    os.kill(pid_of(promoted), signal.SIGSTOP)
    assert wait_for(engine, Role.WORKER, promoted.epoch).pid != promoted.pid
    load.check()


def test_dead_standby_is_not_promoted(standing: Engine) -> None:
    """A supervisor that was stopped notices both deaths at once."""
    before = complete(standing)
    supervisor = Path(f"/proc/{standing.process.pid}/stat")
    standing.process.send_signal(signal.SIGSTOP)
    eventually(lambda: supervisor.read_text().split()[2] == "T", "it is stopped")
    victims = [pid_of(before[role]) for role in (Role.WORKER, Role.STANDBY)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not any(map(is_alive, victims)), "both are dead")
    standing.process.send_signal(signal.SIGCONT)
    wait_for(standing, Role.WORKER, before[Role.WORKER].epoch)
    complete(standing)
    assert standing.log.count("worker died of SIGKILL") == 1


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_no_process_is_left(standing: SharedEngine, number: signal.Signals) -> None:
    """None is left after SIGTERM, nor after SIGKILL of the supervisor."""
    standing.may_end = True
    complete(standing)
    standing.process.send_signal(number)
    standing.process.wait(TIMEOUT_S)
    eventually(lambda: not any(map(is_alive, standing.all_pids)), "all have left")


def test_engine_without_standby_starts_no_zygote(start_engine: EngineFactory) -> None:
    """The null model has none by default."""
    engine = start_engine("--no-api")
    assert {row.role for row in engine.ready().processes} == {
        Role.SUPERVISOR,
        Role.WORKER,
        Role.CORE,
        Role.STANDBY_CORE,
    }


def stall_s(engine: Engine) -> float:
    """The longest pause of the streams after the worker was killed."""
    before = complete(engine)
    load = loaded(engine, 150)
    killed_at = time.monotonic()
    os.kill(pid_of(before[Role.WORKER]), signal.SIGKILL)
    load.check()
    return max(stream.longest_gap_s(killed_at, killed_at + 5.0) for stream in load.streams)


def test_streams_pause_for_less_than_a_second(standing: Engine) -> None:
    within(3, lambda: {"stall_s": stall_s(standing)}, stall_s=1.0)


@pytest.mark.timeout(300)
def test_demo_model_continues_with_the_standby(start_engine: EngineFactory) -> None:
    """The default standby serves seeded streams with penalties exactly, with a second zygote too.

    A worker of the second zygote has as many KV blocks as those of the first, so the core stays.
    """
    engine = start_engine("--num-threads", "1", model="demo")
    core = wait_for(engine, Role.CORE, timeout_s=LOAD_TIMEOUT_S)
    body = {"model": "demo", "prompt": "def __init__(self, ", "max_tokens": 200, "seed": 7}
    body |= {"temperature": 0.8, "frequency_penalty": 0.5}
    complete(engine, LOAD_TIMEOUT_S)
    expected = Stream(engine.url(), **body).join().token_ids
    assert len(expected) == 200
    for round_number in range(3):
        before = complete(engine, LOAD_TIMEOUT_S)
        streams = [Stream(engine.url(), **body) for _ in range(4)]
        wait_for_tokens(streams, 20)
        os.kill(pid_of(before[Role.WORKER]), signal.SIGKILL)
        assert [stream.join().error for stream in streams] == [None] * 4
        assert [stream.token_ids for stream in streams] == [expected] * 4
        worker = wait_for(engine, Role.WORKER, before[Role.WORKER].epoch, LOAD_TIMEOUT_S)
        assert worker.pid == before[Role.STANDBY].pid
        if round_number == 0:
            zygote = complete(engine, LOAD_TIMEOUT_S)[Role.ZYGOTE]
            os.kill(pid_of(zygote), signal.SIGKILL)
            wait_for(engine, Role.ZYGOTE, zygote.epoch, LOAD_TIMEOUT_S)
    assert wait_for(engine, Role.CORE).epoch == core.epoch
