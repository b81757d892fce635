"""Pause, sleep and KV events with real processes that are killed meanwhile."""

import asyncio
import hashlib
import re
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from protocol.api_core import EngineState, PauseMode, Status
from protocol.client import AsyncEngineClient
from protocol.client.kv_feed import KVEventFeed
from protocol.kv_events import AllBlocksCleared, BlocksStored
from protocol.sampling import SamplingParams
from scripts.testing import TIMEOUT_S, EngineFactory
from tests.paths import ROOT
from tests.system.bare_engine import PROMPTS, BareEngine, collect, expected_tokens
from tests.system.recovery.test_supervisor import open_stream

PARAMS = SamplingParams(max_tokens=400)
Control = Callable[[AsyncEngineClient], Awaitable[bool]]


@pytest.fixture
def engine() -> Iterator[BareEngine]:
    with tempfile.TemporaryDirectory() as run_dir:
        running = BareEngine(run_dir, "--null-step-ms", "2", "--enable-kv-events")
        yield running
        running.close()


class Load:
    """One running stream per prompt."""

    def __init__(self, client: AsyncEngineClient) -> None:
        self.client = client
        self.tokens: list[list[int]] = [[] for _ in PROMPTS]
        self._work = asyncio.gather(
            *[collect(client, p, PARAMS, t) for p, t in zip(PROMPTS, self.tokens, strict=True)]
        )

    async def until_each_has(self, num_tokens: int) -> None:
        while min(map(len, self.tokens)) < num_tokens:
            await asyncio.sleep(0.005)

    async def stands_still(self, mode: PauseMode) -> None:
        """Between two reports nothing arrives, and the core reports that it is paused."""
        await next_status(self.client)  # outputs of the steps in flight arrive before it
        before = [tokens.copy() for tokens in self.tokens]
        first = await next_status(self.client)
        second = await next_status(self.client)
        assert (first.pause_mode, second.pause_mode) == (mode, mode)
        assert first.stats.num_steps == second.stats.num_steps
        assert self.tokens == before
        assert not self._work.done()

    async def ends_exactly(self) -> None:
        await self._work
        assert self.tokens == expected_tokens(PROMPTS, PARAMS)


async def next_status(client: AsyncEngineClient) -> Status:
    """Wait for the core's next report."""
    before = client.last_status_time
    while client.last_status_time == before:
        await asyncio.sleep(0.01)
    assert client.status is not None
    return client.status


@asynccontextmanager
async def connected(engine: BareEngine) -> AsyncIterator[AsyncEngineClient]:
    async with AsyncEngineClient(engine.address) as client, asyncio.timeout(60):
        await client.wait_ready(timeout_s=20)
        yield client


PAUSE = (AsyncEngineClient.pause, AsyncEngineClient.resume)
SLEEP = (AsyncEngineClient.sleep, AsyncEngineClient.wake_up)


@pytest.mark.parametrize(
    ("stop", "go_on", "victims"),
    [
        (*PAUSE, ["core_proc"]),
        (*SLEEP, ["core_proc"]),
        (*PAUSE, ["worker_proc"]),
        (*SLEEP, ["worker_proc", "core_proc"]),
    ],
)
def test_a_pause_outlives_kill_9_and_then_every_stream_ends_exactly(
    engine: BareEngine, stop: Control, go_on: Control, victims: list[str]
) -> None:
    async def main() -> None:
        async with connected(engine) as client:
            load = Load(client)
            await load.until_each_has(50)
            assert await stop(client)
            await load.stands_still(PauseMode.PAUSED_ALL)
            for victim in victims:
                engine.replace(victim)
            while await recovered(client) is None:
                await asyncio.sleep(0.01)
            await load.stands_still(PauseMode.PAUSED_ALL)
            assert client.status is not None
            assert client.status.is_sleeping == (stop is AsyncEngineClient.sleep)
            if victims == ["core_proc"]:
                assert client.status.stats.generation_tokens == 0, "it has computed nothing"
            assert await go_on(client)
            await load.ends_exactly()

    async def recovered(client: AsyncEngineClient) -> Status | None:
        status = await next_status(client)
        waits = status.stats.num_waiting_reqs + status.stats.num_running_reqs == len(PROMPTS)
        is_up = status.state is EngineState.READY and status.pause_mode is PauseMode.PAUSED_ALL
        return status if waits and is_up else None

    asyncio.run(main())


def test_paused_new_lets_the_running_ones_end_and_the_new_ones_wait(engine: BareEngine) -> None:
    async def main() -> None:
        async with connected(engine) as client:
            load = Load(client)
            await load.until_each_has(1)
            assert await client.pause(PauseMode.PAUSED_NEW)
            late = client.submit([9, 9], SamplingParams(max_tokens=5))
            await load.ends_exactly()
            status = await next_status(client)
            while status.stats.num_running_reqs or not status.stats.num_waiting_reqs:
                status = await next_status(client)
            assert (status.pause_mode, status.stats.num_waiting_reqs) == (PauseMode.PAUSED_NEW, 1)
            await client.resume()
            assert [t async for output in late for t in output.token_ids] == expected_tokens(
                [[9, 9]], SamplingParams(max_tokens=5)
            )[0]

    asyncio.run(main())


def documented_hashes() -> Callable[[list[int], int, str], list[bytes]]:
    """The function that docs/protocol.md shows."""
    page = (ROOT / "docs" / "protocol.md").read_text()
    code = re.search(r"```python\n(def block_hashes.*?)```", page, re.DOTALL)
    assert code is not None
    names: dict[str, Any] = {"hashlib": hashlib}
    exec(code[1], names)
    function: Callable[[list[int], int, str], list[bytes]] = names["block_hashes"]
    return function


async def follow(feed: KVEventFeed, known: set[bytes], num_snapshots: list[int]) -> None:
    """Apply events until cancelled."""
    async for seq, event in feed:
        if isinstance(event, BlocksStored):
            known.update(event.block_hashes)
        elif isinstance(event, AllBlocksCleared):
            known.clear()
            num_snapshots[0] += seq is None
        else:
            known.difference_update(event.block_hashes)


def test_a_router_computes_the_hashes_itself_and_survives_the_core(engine: BareEngine) -> None:
    prompt = [5 + i % 7 for i in range(60)]
    block_hashes = documented_hashes()

    async def main() -> None:
        async with connected(engine) as client:
            known: set[bytes] = set()
            num_snapshots = [0]
            task = asyncio.create_task(follow(client.kv_events(), known, num_snapshots))

            async def run(prompt: list[int], salt: str) -> set[bytes]:
                params = SamplingParams(max_tokens=30)
                tokens = prompt.copy()
                async for output in client.submit(prompt, params, cache_salt=salt):
                    tokens += output.token_ids
                return set(block_hashes(tokens[:-1], 16, salt))

            expected = await run(prompt, "") | await run(prompt, "né")
            assert len(expected) == 10
            while known != expected:
                await asyncio.sleep(0.01)
            engine.replace("core_proc")
            while num_snapshots[0] < 2:
                await asyncio.sleep(0.01)
            assert known == set()
            expected = await run(prompt, "")
            while known != expected:
                await asyncio.sleep(0.01)
            assert await client.reset_prefix_cache()
            while known:
                await asyncio.sleep(0.01)
            task.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("path", ["/pause", "/sleep"])
def test_over_http_a_paused_stream_is_silent_and_a_shutdown_lets_it_end(
    start_engine: EngineFactory, path: str
) -> None:
    """SIGTERM drains the API first, so the API must end the pause."""
    engine = start_engine("--null-step-ms", "5", "--enable-admin-routes")
    with open_stream(engine, 200) as stream:
        assert "status" in engine.post(path)
        assert engine.get("/is_paused") == {"is_paused": True, "pause_mode": "paused_all"}
        assert engine.get("/is_sleeping") == {"is_sleeping": path == "/sleep"}
        engine.process.terminate()
        events = [line for line in stream.read().splitlines() if line.startswith(b"data")]
    assert events[-1] == b"data: [DONE]"
    assert any(b'"finish_reason":"length"' in event for event in events)
    assert engine.process.wait(TIMEOUT_S) == 0, engine.log
