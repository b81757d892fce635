"""Large bodies of any kind leave the event loop free for other requests, and no memory behind."""

import asyncio
import gc
import time
from collections.abc import Iterator

import httpx
import msgspec
import pytest

from api_proc.bodies import CompletionBody
from api_proc.generation.generation import Generation
from api_proc.http.connection import Connection
from api_proc.responses.body import ResponsesChat
from protocol.config.settings import configure
from tests.api.fake_engine import FACTS, FakeClient, LiveServer, wait_until
from tests.paths import DEMO_MODEL
from tests.system.body_flood import BODIES, body_of
from tests.timing import within

TURN_S = 0.030
"""Processor time of one iteration of the loop; the rest of the latency is other processes'."""
PACKED_TURN_S = 0.010
"""The same for bodies of token ids, the work on which is a copy but for what is done in slices."""
NUM_AT_ONCE = 2
BRIEF = {"some objects", "ids", "prompts", "escapes"}
CASES = [
    pytest.param(name, marks=() if name in BRIEF else pytest.mark.slow, id=name) for name in BODIES
]


class TurnMeter:
    """Measures the processor time of each iteration of an event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.longest_s = 0.0
        self._loop = loop
        self._began: float | None = None
        self._is_stopped = False

    def __enter__(self) -> "TurnMeter":
        self._loop.call_soon_threadsafe(self._turn)
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped = True

    def _turn(self) -> None:
        now = time.thread_time()
        if self._began is not None:
            self.longest_s = max(self.longest_s, now - self._began)
        self._began = now
        if not self._is_stopped:
            self._loop.call_later(0.0005, self._turn)


@pytest.fixture(scope="module")
def live() -> Iterator[LiveServer]:
    facts = msgspec.structs.replace(FACTS, max_model_len=8192, num_gpu_blocks=2**18)
    with LiveServer(configure(model="null"), FakeClient(facts)) as server:
        yield server


async def send(url: str, path: str, body: bytes) -> list[int]:
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        responses = await asyncio.gather(
            *(http.post(path, content=body) for _ in range(NUM_AT_ONCE))
        )
    return [response.status_code for response in responses]


@pytest.fixture(scope="module")
def long_live() -> Iterator[LiveServer]:
    """A server with a real tokenizer and a context for all bodies."""
    facts = msgspec.structs.replace(
        FACTS, vocab_size=4096, max_model_len=2**21, num_gpu_blocks=2**18
    )
    demo = DEMO_MODEL
    with LiveServer(configure(model=str(demo)), FakeClient(facts)) as server:
        yield server


@pytest.mark.parametrize("name", CASES)
def test_no_iteration_of_the_loop_is_long(live: LiveServer, name: str) -> None:
    """No garbage is collected: the process makes that rare (`protocol.process.gc_tuning`)."""
    check_iterations(live, name)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", BODIES)
def test_no_iteration_is_long_with_a_long_context(long_live: LiveServer, name: str) -> None:
    check_iterations(long_live, name)


@pytest.mark.parametrize(
    "name", ["ids of a large vocabulary", "long lists of ids", "ids for a vector"]
)
def test_no_iteration_is_long_when_a_long_prompt_is_submitted(
    long_live: LiveServer, name: str
) -> None:
    check_iterations(long_live, name, PACKED_TURN_S)


def check_iterations(live: LiveServer, name: str, turn_s: float = TURN_S) -> None:
    path, body = body_of(name)

    def measure() -> dict[str, float]:
        live.client.requests.clear()
        gc.disable()
        try:
            with TurnMeter(live.loop) as meter:
                statuses = asyncio.run(send(live.url, path, body))
        finally:
            gc.enable()
        assert set(statuses) <= {200, 400}
        return {"turn_s": meter.longest_s}

    within(4, measure, turn_s=turn_s)
    assert not live.call(live.state.large_requests.working.is_full)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", b"", 400),
        ("/v1/responses", b'{"input": "x", "model": "other"}', 404),
        ("/v1/responses/input_tokens", b'{"input": "x", "model": "other"}', 404),
        ("/v1/completions", b'{"prompt": "x", "use_beam_search": true, "max_tokens": 2}', 200),
    ],
    ids=["ids", "response", "count", "beams"],
)
def test_a_request_is_freed_at_once(live: LiveServer, path: str, body: bytes, status: int) -> None:
    """The garbage collector is not needed. The first case has a large body of ids."""
    if not body:
        path, body = body_of("ids")

    def num_kept() -> int:
        kinds = (CompletionBody, ResponsesChat, Generation, Connection)
        return sum(type(item) in kinds for item in gc.get_objects())

    def collect() -> None:
        gc.collect()
        gc.disable()

    live.call(collect)
    try:
        before = num_kept()
        assert asyncio.run(send(live.url, path, body)) == [status] * NUM_AT_ONCE
        wait_until(lambda: num_kept() <= before, timeout_s=5.0)
    finally:
        gc.enable()
