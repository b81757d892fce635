"""Long texts in processes of their own: the same ids, and limits that end the job alone."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from api_proc.errors import ApiError
from api_proc.fairness.waiting import current_client
from api_proc.text import pool as pool_module
from api_proc.text.chat_template import ChatTemplateError
from api_proc.text.jobs import (
    Chat,
    Decode,
    Encode,
    EncodeChat,
    Job,
    Pieces,
    Render,
    TextLimitReached,
    TextPoolUnavailable,
    TokenIdLists,
)
from api_proc.text.pool import TextPool, _Helper
from api_proc.text.processor import THREAD_CHARS, TextProcessor
from api_proc.text.shared_ids import NUM_SHARED, shared_ids
from api_proc.text.tokenizer import EncodeOptions, TooManyTokens
from protocol.config import ModelConfig
from protocol.config.settings import configure
from protocol.process.cpu_clock import cpu_seconds
from protocol.process.failpoints import VARIABLE
from scripts.testing import eventually, is_alive
from tests.api.conftest import CHAT_TEMPLATE, CORPUS
from tests.api.fake_engine import FACTS, FakeClient, LiveServer
from tests.paths import DEMO_MODEL, ROOT

TEMPLATE = (
    "{%- if kind == 'loops' %}{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}"
    "{% endfor %}{% elif kind == 'text' %}{{ ('x' * n) | length }}"
    "{% elif kind == 'macro' %}{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"
    "{% elif kind == 'range' %}{% for i in range(n) %}{% endfor %}"
    "{% elif kind == 'attribute' %}{{ messages.__class__.__mro__ }}"
    "{% elif kind == 'number' %}{{ (n ** n) is odd }}{% endif %}" + CHAT_TEMPLATE
)
USER = {"role": "user", "content": "hi"}
LIMIT_S = 0.4
PLAIN = EncodeOptions(True, 10**7)
BIG_FACTS = msgspec.structs.replace(
    FACTS, vocab_size=400, max_model_len=2**21, num_gpu_blocks=2**18
)
T = TypeVar("T")


class Pools:
    """Pools in one event loop of a thread, and the directory that arms failpoints in them."""

    def __init__(self, failpoints: Path) -> None:
        self.failpoints = failpoints
        self.loop = uvloop.new_event_loop()
        self._opened: list[TextPool] = []
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()

    def open(self, model: ModelConfig, size: int = 1, max_waiting: int = 8) -> TextPool:
        self._opened.append(TextPool(model, size, max_waiting))
        return self._opened[-1]

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout=60)

    def run(self, pool: TextPool, job: Job) -> Pieces | TokenIdLists:
        return self.call(pool.run(msgspec.json.encode(job)))

    def arm(self, action: str) -> None:
        (self.failpoints / "text.job").write_text(action)

    def is_armed(self) -> bool:
        return (self.failpoints / "text.job").exists()

    def close(self) -> None:
        async def close() -> None:
            for pool in self._opened:
                pool.close()
                await asyncio.gather(*pool._lanes, return_exceptions=True)

        self.call(close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pools]:
    directory = tmp_path_factory.mktemp("failpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(directory))
        pools = Pools(directory)
        yield pools
        pools.close()


@pytest.fixture(scope="module")
def model(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    """A model whose template never ends with some values of its variables."""
    file = tmp_path_factory.mktemp("template") / "template.jinja"
    file.write_text(TEMPLATE)
    return configure(model=str(checkpoint), chat_template=str(file)).model


@pytest.fixture(scope="module")
def pool(pools: Pools, model: ModelConfig) -> TextPool:
    return pools.open(model)


@pytest.fixture
def short_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "LIMIT_S", LIMIT_S)


def helper_of(pool: TextPool) -> _Helper:
    """Return the only helper of a pool that has done a job."""
    [task] = pool._lanes
    frame = task.get_coro().cr_frame  # type: ignore[union-attr]
    assert frame is not None
    helper: _Helper = eventually(lambda: frame.f_locals["lane"]._helper, "there is a helper")
    return helper


def pid_of(pool: TextPool) -> int:
    return helper_of(pool)._process.pid


def render(content: str = "hi", **extra: Any) -> Render:
    return Render(Chat([{"role": "user", "content": content}], True, extra, None, False))


TEXTS = st.lists(
    st.sampled_from([*CORPUS[:3], "<s>", "<|im_end|>", "<|endoftext|>", "\n", " " * 40, "ab" * 30])
    | st.text(max_size=20).filter(lambda text: not any("\ud800" <= c <= "\udfff" for c in text)),
    max_size=6,
).map("".join)


@pytest.mark.parametrize("name", ["checkpoint", "demo"])
def test_ids_are_those_of_the_server_itself(
    name: str, pools: Pools, pool: TextPool, model: ModelConfig
) -> None:
    if name == "demo":
        model = configure(model=str(DEMO_MODEL)).model
        pool = pools.open(model)
    text = TextProcessor.load(model)

    @settings(max_examples=15)
    @given(st.lists(TEXTS, max_size=3), st.booleans(), st.sampled_from([None, 3]), st.booleans())
    def compare(texts: list[str], adds: bool, keep_last: int | None, is_literal: bool) -> None:
        options = EncodeOptions(adds, 10**6, keep_last)
        jobs: list[Job] = [Encode([[part] for part in texts], options, is_literal)]
        jobs.append(Encode([texts], options) if texts else Decode([]))
        if text.template is not None:
            messages = [{"role": "user", "content": content} for content in texts]
            chat = Chat(messages, adds, {"n": 10**30, "x": 1.0}, None, False)
            jobs += [Render(chat), EncodeChat(chat, options)]
            if texts:
                jobs.append(Render(Chat(messages, False, None, [{"a": texts}], True)))
        for job in jobs:
            here = outcome(lambda job=job: text.perform(job))  # type: ignore[misc]
            assert outcome(lambda job=job: pools.run(pool, job)) == here  # type: ignore[misc]
            if isinstance(here, TokenIdLists):
                for token_ids in here.lists:
                    assert pools.run(pool, Decode(token_ids)) == text.perform(Decode(token_ids))

    compare()
    text.close()


def outcome(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except (ChatTemplateError, TooManyTokens) as error:
        return repr(error)


def test_many_ids_cross_in_slices(pools: Pools, pool: TextPool, model: ModelConfig) -> None:
    job = Encode([["ab c"] * 20_000, ["x" * 70_000], [""], *[["one"]] * 1000], PLAIN)
    text = TextProcessor.load(model)
    assert pools.run(pool, job) == text.perform(job)
    text.close()
    with pytest.raises(TooManyTokens):
        pools.run(pool, Encode([["ab"] * 1000], EncodeOptions(False, 10)))


@pytest.mark.parametrize(
    ("extra", "error", "message"),
    [
        ({"kind": "loops"}, TextLimitReached, "longer than"),
        ({"kind": "number", "n": 10**9}, TextLimitReached, "longer than|more than 1024 MiB"),
        ({"kind": "text", "n": 10**10}, TextLimitReached, "more than 1024 MiB"),
        ({"kind": "range", "n": 10**9}, ChatTemplateError, "Range too big"),
        ({"kind": "macro"}, ChatTemplateError, "recursion"),
        ({"kind": "attribute"}, ChatTemplateError, "unsafe"),
    ],
)
@pytest.mark.usefixtures("short_limit")
def test_a_hostile_template_ends_its_request_alone(
    pools: Pools, pool: TextPool, extra: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        pools.run(pool, render(**extra))
    assert isinstance(pools.run(pool, render()), Pieces)


def test_a_job_whose_helper_dies_is_done_by_the_next_one(pools: Pools, pool: TextPool) -> None:
    expected = pools.run(pool, render())
    pid = pid_of(pool)
    pools.arm("kill9@1")
    assert pools.run(pool, render()) == expected
    assert not pools.is_armed()
    assert not is_alive(pid)
    os.kill(pid_of(pool), signal.SIGKILL)  # an idle one
    assert pools.run(pool, render()) == expected


def test_a_job_that_kills_two_helpers_is_refused(pools: Pools, pool: TextPool) -> None:
    expected = pools.run(pool, render())
    pools.arm("kill9@*")
    with pytest.raises(TextLimitReached, match="failed twice"):
        pools.run(pool, render())
    (pools.failpoints / "text.job").unlink()
    assert pools.run(pool, render()) == expected


def test_a_stopped_helper_is_replaced(
    pools: Pools, pool: TextPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools.run(pool, render())
    pid = pid_of(pool)
    monkeypatch.setattr(pool_module, "_longest_wait_s", lambda _: LIMIT_S)
    pools.arm("stop@1")
    with pytest.raises(TextPoolUnavailable, match="does not answer"):
        pools.run(pool, render())
    monkeypatch.undo()
    eventually(lambda: not is_alive(pid), "it was killed")
    assert isinstance(pools.run(pool, render()), Pieces)


def test_waiting_jobs_are_bounded(pools: Pools, model: ModelConfig) -> None:
    """Past the bound a request is refused at once; a cancelled one leaves its place to another."""
    pool = pools.open(model, max_waiting=2)
    pools.run(pool, render())
    pools.arm("delay:600@1")
    body = msgspec.json.encode(render())

    async def run() -> list[Any]:
        first = asyncio.create_task(pool.run(body))
        while pool._num_idle:
            await asyncio.sleep(0.001)
        waiting = [asyncio.create_task(pool.run(body)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError) as caught:
            await pool.run(body)
        assert caught.value.status == 429
        waiting[0].cancel()
        await asyncio.sleep(0)
        return await asyncio.gather(first, *waiting, pool.run(body), return_exceptions=True)

    first, cancelled, second, third = pools.call(run())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(first, Pieces)
    assert first == second == third


def test_clients_have_bounds_of_their_own_and_take_turns(pools: Pools, model: ModelConfig) -> None:
    pool = pools.open(model, max_waiting=3)
    pools.run(pool, render())
    pools.arm("delay:600@1")
    body, order = msgspec.json.encode(render()), list[str]()

    async def ask(client: str) -> None:
        current_client.set(client)
        await pool.run(body)
        order.append(client)

    async def run() -> None:
        first = asyncio.create_task(ask("one"))
        while pool._num_idle:
            await asyncio.sleep(0.001)
        waiting = [asyncio.create_task(ask("one")) for _ in range(3)]
        await asyncio.sleep(0)
        waiting.append(asyncio.create_task(ask("two")))
        await asyncio.sleep(0)
        with pytest.raises(ApiError):
            await asyncio.create_task(ask("one"))
        await asyncio.gather(first, *waiting)

    pools.call(run())
    assert order == ["one", "two", "one", "one", "one"]


def test_an_abandoned_job_does_not_hold_its_lane(
    pools: Pools, pool: TextPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it has used as much processor time as the start of its successor takes."""
    expected = pools.run(pool, render())
    helper = helper_of(pool)
    pid = helper._process.pid
    assert 0.0 < helper._start_cpu_s < 30.0
    monkeypatch.setattr(pool_module, "LIMIT_S", 10.0**6)

    async def run() -> Pieces | TokenIdLists:
        began_cpu_s = cpu_seconds(pid)
        hostile = asyncio.create_task(pool.run(msgspec.json.encode(render(kind="loops"))))
        while cpu_seconds(pid) < began_cpu_s + 0.01:
            await asyncio.sleep(0.001)
        hostile.cancel()
        async with asyncio.timeout(40):
            return await pool.run(msgspec.json.encode(render()))

    assert pools.call(run()) == expected
    assert not is_alive(pid)
    assert pid_of(pool) != pid


def test_a_short_job_that_is_abandoned_costs_no_helper(pools: Pools, pool: TextPool) -> None:
    """Otherwise clients that disconnect would make the pool start one after the other."""
    expected = pools.run(pool, render())
    pid = pid_of(pool)

    async def run() -> Pieces | TokenIdLists:
        for _ in range(5):
            pools.arm("delay:150@1")
            short = asyncio.create_task(pool.run(msgspec.json.encode(render())))
            while pools.is_armed():
                await asyncio.sleep(0.001)
            short.cancel()
        return await pool.run(msgspec.json.encode(render()))

    assert pools.call(run()) == expected
    assert pid_of(pool) == pid


def test_a_job_that_has_waited_too_long_is_refused_while_the_lane_is_busy(
    pools: Pools, pool: TextPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has begun is not."""
    expected = pools.run(pool, render())
    monkeypatch.setattr(pool_module, "MAX_WAIT_S", 0.05)
    pools.arm("delay:500@1")
    body = msgspec.json.encode(render())

    async def run() -> Pieces | TokenIdLists:
        first = asyncio.create_task(pool.run(body))
        while pool._num_idle:
            await asyncio.sleep(0.001)
        with pytest.raises(TextPoolUnavailable, match="has waited"):
            await pool.run(body)
        assert not first.done()
        return await first

    assert pools.call(run()) == expected


def test_jobs_whose_clients_have_left_hold_no_memory_in_the_queue(
    pools: Pools, pool: TextPool
) -> None:
    """Each client may have many, and nothing counts their bytes any more."""
    pools.run(pool, render())
    pools.arm("delay:300@1")
    body = msgspec.json.encode(render())

    async def run() -> int:
        first = asyncio.create_task(pool.run(body))
        while pool._num_idle:
            await asyncio.sleep(0.001)
        left = [asyncio.create_task(pool.run(bytes(1000))) for _ in range(5)]
        await asyncio.sleep(0)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        found = pool._orders.take()
        assert found is not None
        size = len(found[1].body)
        await first
        return size

    assert pools.call(run()) == 0


def test_a_second_process_serves_while_the_first_one_is_busy(
    pools: Pools, model: ModelConfig
) -> None:
    pool = pools.open(model, size=2)
    body = msgspec.json.encode(render())
    expected = pools.run(pool, render())
    pid = pid_of(pool)
    pools.arm("delay:60000@1")

    async def run() -> list[Any]:
        first = asyncio.create_task(pool.run(body))
        while pools.is_armed():
            await asyncio.sleep(0.001)
        second = await pool.run(body)
        assert not first.done()
        os.kill(pid, signal.SIGKILL)
        return [await first, second]

    assert pools.call(run()) == [expected, expected]
    assert len(pool._lanes) == 2


def test_a_helper_that_does_not_start_is_an_error_of_the_request(
    pools: Pools, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = pools.open(ModelConfig(model=str(tmp_path)))
    with pytest.raises(TextPoolUnavailable, match="does not start"):
        pools.run(pool, render())
    assert "tokenizer.json" in capfd.readouterr().err


PARENT = """
import asyncio, os, signal, sys
from api_proc.text.pool import _Helper
from protocol.config import ModelConfig

async def main():
    helper = await _Helper.start(ModelConfig(model="null"))
    print(helper._process.pid, flush=True)
    sys.stdin.read()

asyncio.run(main())
"""


def test_a_helper_ends_with_its_parent(pools: Pools) -> None:
    """So does one that is stopped. The kernel kills a helper first when memory is short."""
    command = [sys.executable, "-P", "-c", PARENT]
    parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "500\n"
    assert Path(f"/proc/{pid}/comm").read_text() == "troika-text\n"
    os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.communicate()
    eventually(lambda: not is_alive(pid), "the helper has left")


@pytest.fixture(scope="module")
def live(model: ModelConfig, pools: Pools) -> Iterator[LiveServer]:
    """A server with a pool."""
    config = configure(model=model.model)
    text = TextProcessor.load(model, 1)
    with LiveServer(config, FakeClient(BIG_FACTS), text) as server:
        yield server


def test_requests_with_long_texts_get_the_same_ids(live: LiveServer, model: ModelConfig) -> None:
    """Every route has the ids that it has without a pool."""
    text = TextProcessor.load(model)
    content = "The lazy dog <|im_end|> 日本 " * 1000
    chat = Chat([{"role": "user", "content": content}], True, {}, None, False)
    for body in ({"prompt": content}, {"prompt": content, "parse_special": False}):
        is_literal = "parse_special" in body
        [expected] = text.perform(Encode([[content]], PLAIN, is_literal)).lists  # type: ignore[union-attr]
        sent = httpx.post(live.url + "/v1/completions", json=body | {"max_tokens": 1}, timeout=30)
        assert sent.status_code == 200, sent.text
        assert live.client.requests[-1].unpacked_prompt == expected
        answer = httpx.post(live.url + "/tokenize", json=body, timeout=30).json()
        assert answer["tokens"] == expected
    [expected] = text.perform(EncodeChat(chat, EncodeOptions(False, 10**6))).lists  # type: ignore[union-attr]
    body = {"messages": chat.messages}
    chats = live.url + "/v1/chat/completions"
    assert httpx.post(chats, json=body | {"max_tokens": 1}, timeout=30).status_code == 200
    assert live.client.requests[-1].unpacked_prompt == expected
    assert httpx.post(live.url + "/tokenize", json=body, timeout=30).json()["tokens"] == expected
    answer = httpx.post(live.url + "/detokenize", json={"tokens": expected}, timeout=30).json()
    assert answer["prompt"] == text.tokenizer.decode(expected, skip_special_tokens=False)
    prompt = httpx.post(live.url + "/apply-template", json=body, timeout=30).json()["prompt"]
    assert prompt == answer["prompt"]
    text.close()


@pytest.mark.usefixtures("short_limit")
def test_a_hostile_request_is_refused_while_others_are_served(live: LiveServer) -> None:
    """A template that never ends: 400 for its chat, and no delay for short prompts."""
    body = {"messages": [USER], "chat_template_kwargs": {"kind": "loops"}, "max_tokens": 1}
    with httpx.Client(base_url=live.url, timeout=30) as http:
        http.post("/apply-template", json={"messages": [USER]}).raise_for_status()
        answers: list[httpx.Response] = []
        hostile = threading.Thread(
            target=lambda: answers.append(
                httpx.post(live.url + "/v1/chat/completions", json=body, timeout=30)
            )
        )
        hostile.start()
        served = 0
        while hostile.is_alive():
            short = {"prompt": "x" * 100, "max_tokens": 1}
            began = time.monotonic()
            assert http.post("/v1/completions", json=short).status_code == 200
            served += time.monotonic() - began < LIMIT_S / 2
        hostile.join()
    [answer] = answers
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == ("messages", "text_limit")
    assert f"longer than {LIMIT_S} s" in error["message"]
    assert served >= 3


HOSTILE_TEXTS = {
    "one character": "a",
    "spaces": " ",
    "newlines": " \n",
    "digits": "7",
    "no spaces": "abcdefghij",
    "marks": "e\u0301\u0301",
    "joined emoji": "👩\u200d",
    "special tokens": "<|im_start|>",
    "nearly special tokens": "<|im_start|",
    "punctuation": "'\"([{",
    "control characters": "\x00\x7f\x1b",
}


@pytest.mark.parametrize("name", HOSTILE_TEXTS)
@pytest.mark.parametrize(
    "size", [pytest.param(2**16, id="64k"), pytest.param(2**22, id="4m", marks=pytest.mark.slow)]
)
def test_hostile_texts_end_in_time(pools: Pools, pool: TextPool, name: str, size: int) -> None:
    """Each is tokenized, or refused because it needs more memory than a helper may have."""
    unit = HOSTILE_TEXTS[name]
    text = unit * (size // len(unit.encode()))
    assert len(text) > THREAD_CHARS
    for is_literal in (False, True):
        try:
            result = pools.run(pool, Encode([[text]], PLAIN, is_literal))
        except TextLimitReached:
            if size < 2**20:
                raise
            continue
        assert isinstance(result, TokenIdLists)
        [piece] = pools.run(pool, Decode(result.lists[0])).pieces  # type: ignore[union-attr]
        assert piece.replace("<s>", "", 1) == text


@given(st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 1000)))
def test_shared_ids_are_equal_ids(token_ids: list[int]) -> None:
    assert shared_ids(token_ids) == token_ids
    small = [token_id for token_id in token_ids if token_id < NUM_SHARED]
    assert all(a is b for a, b in zip(shared_ids(small), shared_ids(small), strict=True))
