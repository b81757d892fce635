"""Streams continue while a megabyte of text is tokenized."""

import asyncio
import json
import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest

from api_proc.text.jobs import TokenIdLists
from api_proc.text.processor import INLINE_CHARS, MAX_LONG_TEXTS, TextProcessor
from api_proc.text.tokenizer import EncodeOptions
from protocol.config.settings import configure
from tests.api.fake_engine import FACTS, FakeClient, LiveServer, wait_until
from tests.timing import within

LAG_MAX_S = 0.02
MEGABYTE = 2**20
BIG_FACTS = msgspec.structs.replace(
    FACTS, vocab_size=400, max_model_len=2**21, num_gpu_blocks=2**18
)


class LagMeter:
    """Measures how late a timer of one millisecond fires in an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.lags_s: list[float] = []
        self._loop = loop
        self._stopped = False

    def __enter__(self) -> "LagMeter":
        self._loop.call_soon_threadsafe(self._arm)
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True

    def _arm(self) -> None:
        if not self._stopped:
            self._loop.call_later(0.001, self._fire, time.perf_counter() + 0.001)

    def _fire(self, due: float) -> None:
        self.lags_s.append(time.perf_counter() - due)
        self._arm()

    def percentile(self, share: float) -> float:
        return sorted(self.lags_s)[int(len(self.lags_s) * share)]


TEXTS = {
    "prose": "The quick brown fox jumps over the lazy dog. " * (MEGABYTE // 45),
    "one character": "a" * MEGABYTE,
    "emoji": "".join(chr(0x1F300 + i % 500) for i in range(MEGABYTE // 4)),
    "special tokens": "<|im_start|>" * (MEGABYTE // 12),
}


@pytest.mark.parametrize("name", TEXTS)
def test_tokenizing_a_megabyte_does_not_hold_up_the_loop(checkpoint: Path, name: str) -> None:
    config = configure(model=str(checkpoint))
    body = json.dumps({"prompt": TEXTS[name], "max_tokens": 1}).encode()
    with LiveServer(config, FakeClient(BIG_FACTS)) as live, httpx.Client(timeout=30) as http:
        http.get(live.url + "/livez")

        def measure() -> dict[str, float]:
            with LagMeter(live.loop) as meter:
                response = http.post(live.url + "/v1/completions", content=body)
            assert response.status_code == 200, response.text
            assert response.json()["usage"]["prompt_tokens"] > MEGABYTE / 50
            assert len(meter.lags_s) > 5
            return {"lag_s": meter.percentile(0.99)}

        within(20, measure, lag_s=LAG_MAX_S)


def test_prompt_that_cannot_fit_is_rejected_before_it_is_tokenized(checkpoint: Path) -> None:
    config = configure(model=str(checkpoint))
    with LiveServer(config, FakeClient()) as live:
        body = {"prompt": "x" * MEGABYTE}
        response = httpx.post(live.url + "/v1/completions", json=body, timeout=30)
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert live.text._pool is not None
        assert not live.text._pool._lanes, "the process for long texts was never needed"


def test_waiting_long_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no pool, so they wait in the queue of the thread."""
    text = TextProcessor.load(configure(model="null").model)
    release = threading.Event()

    def wait(*_: object) -> TokenIdLists:
        release.wait(10)
        return TokenIdLists([[]])

    monkeypatch.setattr(text, "perform", wait)

    def encode() -> asyncio.Task[list[list[int]]]:
        long, options = "x" * (INLINE_CHARS + 1), EncodeOptions(True, 10**6)
        return asyncio.create_task(text.encode([long], options, param="prompt"))

    async def run() -> list[object]:
        blocked = [encode() for _ in range(MAX_LONG_TEXTS)]
        await asyncio.sleep(0)
        try:
            return await asyncio.gather(encode(), return_exceptions=True)
        finally:
            release.set()
            await asyncio.gather(*blocked)

    [error] = asyncio.run(run())
    assert getattr(error, "status", None) == 429
    text.close()


def test_streams_continue_while_a_prompt_is_tokenized(checkpoint: Path) -> None:
    """A client measures it: the gaps between tokens stay those of the engine."""
    config = configure(model=str(checkpoint))

    def read(url: str, gaps: list[float]) -> None:
        body = {"prompt": "x", "stream": True, "max_tokens": 4000}
        with httpx.stream("POST", url, json=body, timeout=30) as response:
            last = time.perf_counter()
            for _ in response.iter_raw():
                now = time.perf_counter()
                gaps.append(now - last)
                last = now

    def measure() -> dict[str, float]:
        gaps: list[float] = []
        with LiveServer(config, FakeClient(BIG_FACTS)) as live:
            url = live.url + "/v1/completions"
            reader = threading.Thread(target=read, args=(url, gaps))
            reader.start()
            wait_until(lambda: len(gaps) > 10)
            body = {"prompt": TEXTS["prose"], "max_tokens": 1}
            assert httpx.post(url, json=body, timeout=30).status_code == 200
            reader.join(timeout=30)
        return {"gap_s": sorted(gaps)[int(len(gaps) * 0.99)]}

    within(5, measure, gap_s=LAG_MAX_S)
