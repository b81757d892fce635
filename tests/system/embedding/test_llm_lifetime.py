"""The Python interface: aborts and ends of engines, and what the host keeps."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing

import pytest

from api_proc.llm import LLM, AsyncLLM, Pooling, PoolingType, RequestOutputKind, SamplingParams
from protocol.client.errors import EngineFailed, InvalidRequest, RequestFailed
from protocol.lifecycle import Role
from scripts.testing import eventually
from tests.paths import ROOT
from tests.system import host_state
from tests.system.embedding.generation import GREEDY, PROMPTS, SETTINGS, expected, token_ids


async def stream_all(llm: AsyncLLM) -> None:
    """The kinds of outputs of one prompt add up to the same result."""
    whole = {}
    for kind in RequestOutputKind:
        params = SamplingParams(
            temperature=0, max_tokens=30, n=2, seed=1, logprobs=1, output_kind=kind
        )
        outputs = [output async for output in llm.generate([5, 6, 7], params)]
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert (len(outputs) == 1) == (kind is RequestOutputKind.FINAL_ONLY)
        last = outputs[-1].outputs
        if kind is RequestOutputKind.DELTA:
            for item in last:
                parts = [output.outputs[item.index] for output in outputs]
                item.text = "".join(part.text for part in parts)
                item.token_ids = [token for part in parts for token in part.token_ids]
                item.logprobs = [row for part in parts for row in part.logprobs or []]
        whole[kind] = last
    assert whole[RequestOutputKind.DELTA] == whole[RequestOutputKind.FINAL_ONLY]
    assert whole[RequestOutputKind.CUMULATIVE] == whole[RequestOutputKind.FINAL_ONLY]
    assert len(whole[RequestOutputKind.DELTA][0].token_ids) == 30


LONG = SamplingParams(temperature=0, max_tokens=6000)


async def embed(llm: AsyncLLM) -> None:
    """Vectors are the same one by one and at once; a cancelled task leaves no request."""
    vectors = await asyncio.gather(*(llm.embed(prompt) for prompt in PROMPTS[:8]))
    assert [output.prompt_token_ids for output in vectors] == PROMPTS[:8]
    assert (await llm.embed(PROMPTS[3])).outputs == vectors[3].outputs
    short = await llm.embed("hi", Pooling(PoolingType.MEAN, dimensions=3), priority=1)
    assert len(short.outputs.embedding) == 3
    with pytest.raises(InvalidRequest, match="dimensions 9999 is more than the 16"):
        await llm.embed("hi", Pooling(dimensions=9999))
    client = llm._processes._client
    assert client is not None
    task = asyncio.create_task(llm.embed([5] * 4000))
    while not client.num_open_requests:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert client.num_open_requests == 0


async def leave_early(llm: AsyncLLM) -> None:
    """Leaving, cancelling and aborting end a request in the engine."""
    async with aclosing(llm.generate([5], LONG)) as outputs:
        async for _ in outputs:
            break

    async def read() -> None:
        async for _ in llm.generate([6], LONG, "to be cancelled"):
            began.set()

    began = asyncio.Event()
    reader = asyncio.create_task(read())
    await began.wait()
    with pytest.raises(InvalidRequest, match="'to be cancelled' is the id of an open request"):
        await anext(llm.generate([6], LONG, "to be cancelled"))
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    ends = []
    async for output in llm.generate([7], LONG, "to be aborted"):
        await llm.abort("to be aborted")
        ends.append(output)
    assert (ends[-1].finished, ends[-1].outputs[0].finish_reason) == (True, "abort")
    assert not llm._engine._open
    client = llm._processes._client
    assert client is not None
    assert client.num_open_requests == 0
    async with asyncio.timeout(10):
        while client.status is None or client.status.stats.num_running_reqs:
            await asyncio.sleep(0.05)


def test_async_llm_streams_and_aborts_and_leaves_the_host_as_it_was() -> None:
    async def main() -> None:
        before = host_state.settings()
        async with AsyncLLM("null", **SETTINGS) as llm:
            await stream_all(llm)
            await leave_early(llm)
            await embed(llm)
            reading = asyncio.create_task(anext(llm.generate([8], LONG)))
            await reading
            open_end = llm.generate([9], LONG)
            await anext(open_end)
        with pytest.raises(RequestFailed, match="closed"):
            _ = [output async for output in open_end]
        await llm.close()
        assert host_state.changes(before, host_state.settings()) == []

    asyncio.run(main())


def test_close_is_idempotent_and_quick_in_any_state() -> None:
    before = host_state.settings()
    descriptors = host_state.resources()["descriptors"]
    llm = LLM("null", **SETTINGS)
    failures: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate(PROMPTS, LONG, use_tqdm=False)
        except RequestFailed as failure:
            failures.append(failure)

    thread = threading.Thread(target=generate)
    thread.start()
    eventually(lambda: llm._engine._open, "requests run")
    began = time.monotonic()
    llm.close()
    llm.close()
    assert time.monotonic() - began < 9.0
    thread.join(10)
    assert [type(failure) for failure in failures] != []
    with pytest.raises(RequestFailed, match="closed"):
        llm.generate([[1]], use_tqdm=False)
    assert host_state.changes(before, host_state.settings()) == []
    eventually(lambda: host_state.resources()["descriptors"] == descriptors, "nothing is left")


def test_interrupt_aborts_the_requests(llm: LLM) -> None:
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner may ignore it
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
    finally:
        signal.signal(signal.SIGINT, former)
    eventually(lambda: not llm._engine._open, "no request is open")
    assert len(llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)) == 2


def test_threads_and_loops_share_an_engine(llm: LLM) -> None:
    async def in_a_loop(prompts: list[list[int]]) -> list[list[int]]:
        return token_ids(llm.generate(prompts, GREEDY, use_tqdm=False))

    parts = [PROMPTS[first::4] for first in range(4)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda prompts: asyncio.run(in_a_loop(prompts)), parts))
    tokens = expected(PROMPTS, GREEDY)
    assert results == [tokens[first::4] for first in range(4)]


def test_fork_of_the_host_does_not_end_the_engine(llm: LLM) -> None:
    pid = os.fork()
    if pid == 0:
        llm.close()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert len(llm.generate(PROMPTS[:2], GREEDY, use_tqdm=False)) == 2


def test_start_that_is_cancelled_leaves_no_process() -> None:
    async def main() -> str:
        llm = AsyncLLM("null", **SETTINGS)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.start(), 0.05)
        return llm.run_dir

    assert not os.path.exists(asyncio.run(main()))


def test_requests_fail_soon_after_the_supervisor_is_killed() -> None:
    """No other process can continue them, so nothing waits until the stall timeout."""

    async def main() -> None:
        async with AsyncLLM("null", **SETTINGS) as llm:
            open_end = llm.generate([5], LONG)
            await anext(open_end)
            await llm.check_health()
            processes = llm._processes._processes
            assert processes is not None
            status = await asyncio.to_thread(processes.status)
            assert status is not None
            [pid] = [row.pid for row in status.processes if row.role is Role.SUPERVISOR]
            os.kill(pid, signal.SIGKILL)
            async with asyncio.timeout(30):
                with pytest.raises(EngineFailed, match="supervisor ended with status -9"):
                    _ = [output async for output in open_end]
                with pytest.raises(EngineFailed, match="supervisor ended with status -9"):
                    await anext(llm.generate([6], LONG))
            with pytest.raises(EngineFailed, match="supervisor ended with status -9"):
                await llm.check_health()

    asyncio.run(main())


def test_engine_ends_with_its_object_and_with_its_program() -> None:
    """The program has no main guard and does not call `close`."""
    source = """
import os
from api_proc.llm import LLM
from scripts.testing import eventually
llm = LLM("null", log_level="error")
run_dir = llm.run_dir
assert len(llm.generate([[1], [2]], use_tqdm=False)) == 2
del llm
eventually(lambda: not os.path.exists(run_dir), "the engine has ended")
llm = LLM("null", log_level="error")
assert len(llm.generate([[1], [2]], use_tqdm=False)) == 2
print(llm.run_dir)
"""
    command = [sys.executable, "-c", source]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    run_dir = done.stdout.strip()
    eventually(lambda: not os.path.exists(run_dir), "the engine has ended")
