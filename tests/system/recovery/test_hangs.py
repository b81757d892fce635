"""Processes that live but make no progress: stopped, stuck in a step, holding the interpreter.

Each is suspected, prints its stacks if it can, is killed and replaced, and every stream goes on
exactly. Clients are those of embedding programs; the engine has the null model.
"""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from protocol.client import AsyncEngineClient
from protocol.lifecycle import Role
from protocol.process import failpoints
from protocol.process.run_dir import client_address
from protocol.process.status import StatusLink
from protocol.sampling import SamplingParams
from scripts.testing import TIMEOUT_S, Engine, EngineFactory, eventually, is_alive
from tests.system import long_steps
from tests.system.bare_engine import collect, expected_tokens
from tests.system.null_load import Stream
from tests.system.shared_engines import EnginePool, SharedEngine
from tests.timing import within

PROMPTS = [[5, 6, 7, n] for n in range(8)]
PARAMS = SamplingParams(max_tokens=400)
QUICK = (
    "--no-api",
    "--null-step-ms",
    "2",
    "--hang-timeout-s",
    "1",
    "--first-step-timeout-s",
    "1",
    "--hang-step-factor",
    "2",
    "--restart-backoff-max-s",
    "0",
)
"""A process without progress for a second is suspected, however long steps take on this machine.

Successors start without a pause, however often processes die before they have done work.
"""
WITHIN_S = 10.0
"""From the stop to the successor's start: 2 s, and up to 2 s for a standby that is starting."""
DETECTION_S = 0.05
"""From SIGKILL to the moment at which the supervisor has reaped the process."""


@pytest.fixture
def quick(shared_engine: EnginePool) -> SharedEngine:
    """An engine whose processes are suspected soon, with failpoints."""
    return shared_engine(*QUICK, has_failpoints=True)


@pytest.fixture
def armed(start_engine: EngineFactory) -> Path:
    """The directory of the failpoints that engines are started with."""
    directory = Path(start_engine.base) / "failpoints"
    directory.mkdir()
    start_engine.environ[failpoints.VARIABLE] = str(directory)
    return directory


def streams_through(
    engine: Engine, harms: list[Callable[[], object]], params: SamplingParams = PARAMS
) -> list[list[int]]:
    """Run all prompts and inject a fault whenever all streams have advanced."""
    streams: list[list[int]] = [[] for _ in PROMPTS]
    engine.ready()

    async def main() -> None:
        address = client_address(engine.run_dir)
        async with AsyncEngineClient(address) as client, asyncio.timeout(90):
            await client.wait_ready(timeout_s=TIMEOUT_S)
            pairs = zip(PROMPTS, streams, strict=True)
            work = asyncio.gather(*[collect(client, p, params, tokens) for p, tokens in pairs])
            for number, harm in enumerate(harms):
                while min(map(len, streams)) < 40 * (number + 1):
                    await asyncio.sleep(0.005)
                await asyncio.to_thread(harm)
            await work

    asyncio.run(main())
    return streams


def stop(engine: Engine, role: Role, within_s: float) -> None:
    """Stop one process, wait until it is replaced, and continue what is left of it."""
    old = engine.row(role)
    assert old.pid is not None
    os.kill(old.pid, signal.SIGSTOP)
    stopped_at = time.monotonic()

    def replaced() -> bool:
        reply = engine.status()
        rows = [] if reply is None else reply.processes
        return any(row.role is role and row.epoch > old.epoch for row in rows)

    eventually(replaced, f"{role} is replaced", within_s)
    assert time.monotonic() - stopped_at < within_s
    with pytest.raises(ProcessLookupError):  # it was dead and reaped before its successor started
        os.kill(old.pid, signal.SIGCONT)


def fenced_frames(engine: Engine) -> int:
    """Return the core's counter of fenced frames."""

    async def ask() -> int:
        async with AsyncEngineClient(client_address(engine.run_dir)) as client:
            await client.wait_ready(timeout_s=TIMEOUT_S)
            assert client.status is not None
            return client.status.stats.fenced_frames

    return asyncio.run(ask())


def test_stopped_processes_are_replaced_and_every_stream_continues(quick: SharedEngine) -> None:
    """Under load, the worker gets SIGSTOP, then the core, and the worker again."""
    roles = (Role.WORKER, Role.CORE, Role.WORKER)
    harms = [lambda role=role: stop(quick, role, WITHIN_S) for role in roles]
    assert streams_through(quick, harms) == expected_tokens(PROMPTS, PARAMS)
    log = quick.log
    for role in (Role.WORKER, Role.CORE):
        suspicion = rf"{role} \(\w+( \d+)?\) has shown no progress for 1\.\d s; the stacks"
        assert re.search(suspicion, log), log
        assert f"{role} died of SIGKILL" in log
    assert "it hung" in log
    assert "seems to hang: no further steps" in log
    assert "died in step" in log or "died at rest" in log
    assert re.search(r"core of epoch \d+ died: deadline", log)
    assert fenced_frames(quick) == 0, "a dead process sends no frames"


@pytest.mark.parametrize("role", [Role.WORKER, Role.CORE])
def test_stopped_process_is_replaced_in_time_at_defaults(
    start_engine: EngineFactory, role: Role
) -> None:
    """With default settings a stopped process is replaced within 5.5 s."""
    engine = start_engine("--no-api", "--null-step-ms", "2")
    streams = streams_through(engine, [lambda: stop(engine, role, 5.5)])
    assert streams == expected_tokens(PROMPTS, PARAMS)


def test_idle_process_that_is_stopped_is_replaced_too(quick: SharedEngine) -> None:
    """No request waits for it yet."""
    for role in (Role.WORKER, Role.CORE):
        stop(quick, role, WITHIN_S)
        quick.ready()


@pytest.mark.parametrize("action", ["delay", "hold"])
def test_step_that_never_ends_is_killed_after_its_stacks_are_printed(
    quick: SharedEngine, action: str
) -> None:
    """It hangs in Python, or in C code that holds the interpreter, so that no other thread runs."""
    harms = [lambda: failpoints.arm(quick.failpoints, "worker.before_step", f"{action}:60000@1")]
    assert streams_through(quick, harms) == expected_tokens(PROMPTS, PARAMS)
    log = quick.log
    assert re.search(r"worker \(step \d+\) has shown no progress", log), log
    assert re.search(r"died in step \d+: deadline", log), log
    assert "in hit" in log
    assert "worker_proc/loop.py" in log, "the stack shows the place of the hang"


def test_core_that_hangs_is_replaced(quick: SharedEngine) -> None:
    """The core hangs in the middle of a turn."""
    harms = [lambda: failpoints.arm(quick.failpoints, "core.after_drain", "hold:60000@1")]
    assert streams_through(quick, harms) == expected_tokens(PROMPTS, PARAMS)
    assert "core (turn) has shown no progress" in quick.log
    assert "core_proc/loop.py" in quick.log


def test_hanging_worker_that_recovers_in_time_is_spared(
    start_engine: EngineFactory, armed: Path
) -> None:
    """It is suspected, then cleared and gets work again; no process dies."""
    engine = start_engine(*QUICK, "--hang-timeout-s", "2")
    worker = engine.pid(Role.WORKER)
    harms = [lambda: failpoints.arm(armed, "worker.before_step", "delay:3000@1")]
    assert streams_through(engine, harms) == expected_tokens(PROMPTS, PARAMS)
    assert re.search(r"worker \(step \d+\) continues after", engine.log)
    assert engine.pid(Role.WORKER) == worker


def test_supervisor_that_was_stopped_kills_no_process(quick: SharedEngine) -> None:
    """All marks are old when it wakes, but it was not watching, and processes were stopped."""
    pids = {role: quick.pid(role) for role in (Role.WORKER, Role.CORE)}
    stopped = [*pids.values(), quick.process.pid]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(4.0)  # four times the limit
    for pid in reversed(stopped):
        os.kill(pid, signal.SIGCONT)
    streams = streams_through(quick, [])
    assert streams == expected_tokens(PROMPTS, PARAMS)
    assert {role: quick.pid(role) for role in pids} == pids


def test_process_that_starts_waits_for_a_stopped_supervisor(
    start_engine: EngineFactory, armed: Path
) -> None:
    """The supervisor was stopped right after it started the process; the start does not fail."""
    engine = start_engine(*QUICK)
    worker = engine.row(Role.WORKER)
    assert worker.pid is not None
    failpoints.arm(armed, "supervisor.after_start", "stop@1")
    os.kill(worker.pid, signal.SIGKILL)
    state = Path(f"/proc/{engine.process.pid}/stat")
    eventually(lambda: state.read_text().split()[2] == "T", "the supervisor is stopped")
    time.sleep(5.5)  # longer than a start should wait in vain
    engine.process.send_signal(signal.SIGCONT)
    eventually(lambda: engine.row(Role.WORKER).epoch > worker.epoch, "the worker is replaced")
    assert "no supervisor at" not in engine.log
    assert engine.row(Role.WORKER).num_restarts == 1


def test_long_steps_on_a_busy_machine_cause_no_kill(start_engine: EngineFactory) -> None:
    """Each takes nine tenths of its time; `python -m tests.system.long_steps` runs more of them."""
    outcome = long_steps.run(start_engine, steps=80, ranks=8, hogs=3, timeout_s=0.5)
    assert outcome.num_steps >= 80
    assert outcome.num_kills == 0, outcome


@pytest.mark.timeout(300)
def test_death_by_sigkill_is_noticed_at_once(quick: SharedEngine) -> None:
    """The pidfd wakes the supervisor: each of six deaths is noticed within 50 ms."""
    failpoints.arm(quick.failpoints, "supervisor.after_death", "note@*")
    roles = (Role.WORKER, Role.CORE) * 3
    within(
        5,
        lambda: {"detection_s": max(measure_detection(quick, role) for role in roles)},
        detection_s=DETECTION_S,
    )


def measure_detection(engine: SharedEngine, role: Role) -> float:
    """Return the seconds from a kill until the supervisor has noted the death."""
    log = engine.failpoints / failpoints.LOG_FILE
    pid = engine.pid(role)
    log.write_text("")
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    line = eventually(log.read_text, "the death is noted")
    assert not is_alive(pid)
    return float(line.split()[0]) - killed_at


@pytest.fixture
def with_api(shared_engine: EnginePool) -> SharedEngine:
    """An engine whose API is suspected soon, with failpoints."""
    flags = ("--null-step-ms", "10", "--api-hang-timeout-s", "0.5")
    return shared_engine(*flags, has_failpoints=True)


def is_answered(engine: Engine) -> bool:
    """Whether a request is answered; its connection may still be with the dead API."""
    stream = Stream(engine.url(), model="null", prompt=[4], max_tokens=2).join()
    return stream.error is None and len(stream.token_ids) == 2


@pytest.mark.parametrize("way", ["SIGSTOP", "C code"])
def test_api_with_a_stopped_loop_is_replaced(with_api: SharedEngine, way: str) -> None:
    """The socket stays open: requests that arrive meanwhile are answered by its successor."""
    api = with_api.row(Role.API)
    assert api.pid is not None
    assert is_answered(with_api)
    if way == "SIGSTOP":
        os.kill(api.pid, signal.SIGSTOP)
    else:
        failpoints.arm(with_api.failpoints, "api.before_flush", "hold:60000@1")
        Stream(with_api.url(), model="null", prompt=[5], max_tokens=2)
    suspicion = re.compile(r"api \(turn\) has shown no progress for 0\.[5-9] s; the stacks")
    eventually(lambda: suspicion.search(with_api.log), "it is suspected, and not too late")
    waiting = Stream(with_api.url(), model="null", prompt=[4], max_tokens=2)
    eventually(lambda: with_api.row(Role.API).epoch > api.epoch, "it is replaced")
    assert waiting.join().error is None
    assert len(waiting.token_ids) == 2
    assert "api died of SIGKILL: it hung" in with_api.log
    if way == "C code":
        assert "in hit" in with_api.log, "its stacks are printed"


def test_api_with_much_to_do_is_left_alone(with_api: SharedEngine) -> None:
    """Under large bodies and many streams at once the loop keeps turning."""
    pid = with_api.pid(Role.API)
    streams = [
        Stream(with_api.url(), model="null", prompt=[7] * 8000, max_tokens=40) for _ in range(24)
    ]
    assert [stream.join().error for stream in streams] == [None] * len(streams)
    assert "shown no progress" not in with_api.log
    assert with_api.pid(Role.API) == pid


def test_api_that_hangs_while_it_leaves_is_killed_in_time(with_api: SharedEngine) -> None:
    """Its progress page has moved to another slot with it."""
    stream = Stream(with_api.url(), model="null", prompt=[4], max_tokens=8000)
    eventually(lambda: stream.token_ids, "it has begun")
    old = with_api.row(Role.API)
    assert old.pid is not None
    link = StatusLink(with_api.run_dir)
    reply = link.restart(Role.API, TIMEOUT_S)
    assert reply is not None
    assert reply.accepted, reply.reason
    link.close()
    eventually(lambda: with_api.row(Role.API).epoch > old.epoch, "its successor serves")
    os.kill(old.pid, signal.SIGSTOP)
    eventually(lambda: not is_alive(old.pid or 0), "it is killed")
    assert "api spare (turn) has shown no progress" in with_api.log
    assert is_answered(with_api)
