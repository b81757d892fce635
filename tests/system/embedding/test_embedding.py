"""Embedding: the clients with a real core and null worker, and the engine in one process."""

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path

import pytest

from protocol.api_core import ErrorCode
from protocol.client import AsyncEngineClient
from protocol.client.errors import RequestFailed
from protocol.client.sync_client import EngineClient
from protocol.config.settings import configure
from protocol.process.run_dir import client_address
from protocol.sampling import FinishReason, SamplingParams
from scripts.inprocess import InprocEngine

ROOT = Path(__file__).resolve().parents[3]
PROMPTS = [[5, 6, 7, n] for n in range(16)]


class Engine:
    """A core and a null worker started by hand, each replaceable."""

    def __init__(self, run_dir: str, *flags: str) -> None:
        self._run_dir = run_dir
        self._flags = flags
        self._epoch = 0
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.start("core_proc")
        self.start("worker_proc")

    @property
    def address(self) -> str:
        return client_address(self._run_dir)

    def start(self, module: str) -> None:
        self._epoch += 1
        command = [sys.executable, "-m", module, "--run-dir", self._run_dir, "--model", "null"]
        command += ["--epoch", str(self._epoch), *self._flags]
        self.processes[module] = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)

    def replace(self, module: str) -> None:
        self.kill(module)
        self.start(module)

    def kill(self, module: str) -> None:
        self.processes[module].kill()
        self.processes[module].wait(timeout=10)

    def close(self) -> None:
        for module in self.processes:
            self.kill(module)


@pytest.fixture
def engine() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory() as run_dir:
        running = Engine(run_dir, "--null-step-ms", "1")
        yield running
        running.close()


def expected_tokens(prompts: list[list[int]], params: SamplingParams) -> list[list[int]]:
    """Return the outputs of the same engine in one process."""
    reference = InprocEngine(configure(model="null"))
    tokens: dict[int, list[int]] = {}
    for output in reference.generate(prompts, params):
        tokens.setdefault(output.request_id, []).extend(output.token_ids)
    return [tokens[request_id] for request_id in sorted(tokens)]


async def collect(
    client: AsyncEngineClient, prompt: list[int], params: SamplingParams, tokens: list[int]
) -> None:
    async for output in client.submit(prompt, params):
        assert output.first_index == len(tokens)
        tokens += output.token_ids


@pytest.mark.parametrize(
    "victims",
    [
        pytest.param(["worker_proc"], marks=pytest.mark.slow),
        pytest.param(["core_proc"], marks=pytest.mark.slow),
        ["worker_proc", "core_proc"],
    ],
)
def test_streams_continue_exactly_after_kill_9(engine: Engine, victims: list[str]) -> None:
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


def test_sync_client_streams_and_cancels(engine: Engine) -> None:
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


def test_refusals_name_the_field_and_the_engine_continues(engine: Engine) -> None:
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


def test_death_of_a_client_aborts_its_requests(engine: Engine) -> None:
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


def test_orphans_leave() -> None:
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
