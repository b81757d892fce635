"""Embedding: the clients with a real core and null worker, and the engine in one process."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import repeat

import pytest

from protocol.api_core import ErrorCode
from protocol.client import AsyncEngineClient
from protocol.client.errors import RequestFailed
from protocol.client.sync_client import EngineClient
from protocol.sampling import FinishReason, SamplingParams
from tests.paths import ROOT
from tests.system.bare_engine import PROMPTS, BareEngine, collect, expected_tokens


@pytest.fixture
def engine() -> Iterator[BareEngine]:
    with tempfile.TemporaryDirectory() as run_dir:
        running = BareEngine(run_dir, "--null-step-ms", "1")
        yield running
        running.close()


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(["worker_proc"], marks=pytest.mark.slow),
        pytest.param(["core_proc"], marks=pytest.mark.slow),
        ["worker_proc", "core_proc"],
    ],
)
def test_streams_continue_exactly_after_kill_9(engine: BareEngine, victims: list[str]) -> None:
    """Two kills under load change no stream."""
    params = SamplingParams(max_tokens=600)

    streams: list[list[int]] = [[] for _ in PROMPTS]

    async def main() -> None:
        async with AsyncEngineClient(engine.address) as client, asyncio.timeout(60):
            await client.wait_ready(timeout_s=20)
            work = asyncio.gather(
                *[
                    collect(client, *args)
                    for args in zip(PROMPTS, repeat(params), streams, strict=False)
                ]
            )
            for num_tokens in (100, 300):
                while min(map(len, streams)) < num_tokens:
                    await asyncio.sleep(0.005)
                for victim in victims:
                    engine.replace(victim)
            await work

    asyncio.run(main())
    assert streams == expected_tokens(PROMPTS, params)


def test_sync_client_streams_and_cancels(engine: BareEngine) -> None:
    with EngineClient(engine.address) as client:
        facts = client.wait_ready(timeout_s=20)
        assert facts.model == "null"
        params = SamplingParams(max_tokens=9)
        whole = client.submit([1, 2, 3], params).result(timeout_s=10)
        assert [whole.token_ids] == expected_tokens([[1, 2, 3]], params)
        assert whole.finish_reason is FinishReason.LENGTH
        endless = client.submit([1], SamplingParams(max_tokens=8000))
        assert next(iter(endless)).token_ids
        endless.cancel()
        assert list(endless) == []


def test_refusals_name_the_field_and_the_engine_continues(engine: BareEngine) -> None:
    with EngineClient(engine.address) as client:
        client.wait_ready(timeout_s=20)
        for prompt, code in (
            ([], ErrorCode.INVALID),
            ([32_000], ErrorCode.INVALID),
            ([1] * 8192, ErrorCode.TOO_LONG),
        ):
            with pytest.raises(RequestFailed) as caught:
                client.submit(prompt, SamplingParams())
            assert (caught.value.error.code, caught.value.error.param) == (code, "prompt")
        assert len(client.submit([1], SamplingParams()).result(timeout_s=10).token_ids) == 16


def test_death_of_a_client_aborts_its_requests(engine: BareEngine) -> None:
    script = (
        "import sys, time\nfrom protocol.client.sync_client import EngineClient\n"
        "from protocol.sampling import SamplingParams\n"
        "client = EngineClient(sys.argv[1]); client.wait_ready(20)\n"
        "streams = [client.submit([n], SamplingParams(max_tokens=8000)) for n in range(8)]\n"
        "next(iter(streams[0])); print('running', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, engine.address]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == b"running\n"

        async def main() -> None:
            async with AsyncEngineClient(engine.address) as client:
                await client.wait_ready(timeout_s=10)
                assert client.status is not None
                host.kill()
                async with asyncio.timeout(10):
                    while (
                        client.status.stats.num_running_reqs or client.status.stats.kv_cache_usage
                    ):
                        await asyncio.sleep(0.05)

        asyncio.run(main())


def test_a_process_leaves_with_its_parent() -> None:
    """EOF of the parent pipe ends a process in any state."""
    read, write = os.pipe()
    script = (
        "import sys\nfrom protocol.process.child_runtime import watch_parent\nimport time\n"
        "watch_parent(int(sys.argv[1])); print('up', flush=True); time.sleep(60)\n"
    )
    command = [sys.executable, "-c", script, str(read)]
    with subprocess.Popen(command, cwd=ROOT, pass_fds=[read], stdout=subprocess.PIPE) as child:
        os.close(read)
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        os.close(write)
        assert child.wait(timeout=20) == 75
