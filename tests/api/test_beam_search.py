"""Beam search: the beams of an exhaustive search, its ends, and what cuts it short."""

import asyncio
import itertools
import math
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest

from api_proc.llm import BeamSearchParams
from api_proc.text.beam_search import (
    Beam,
    BeamSearch,
    BeamSearchOptions,
    BeamSearchResult,
    beam_search,
)
from api_proc.text.checkpoint import SamplingDefaults
from protocol.api_core import AddRequest, ErrorCode, RequestError, RequestOutput
from protocol.client.errors import InvalidRequest, Overloaded, RequestFailed
from protocol.core_worker import TokenLogprobs
from protocol.sampling import FinishReason, SamplingParams
from tests.api.conftest import MakeServer
from tests.api.fake_engine import EOS_ID, FIRST_BYTE_ID, FakeClient, LiveServer, wait_until

COMPLETIONS = "/v1/completions"
PROMPT = [5, 6]
END = 0


class TinyModel:
    """A few tokens whose log-probabilities are a random function of all tokens before."""

    def __init__(self, seed: int, vocab_size: int = 4) -> None:
        self.vocab_size = vocab_size
        self._seed = seed
        self.num_steps = 0
        self.num_open = 0

    def logprobs(self, token_ids: list[int]) -> list[float]:
        chance = random.Random(repr((self._seed, token_ids)))
        weights = [chance.uniform(0.05, 1.0) for _ in range(self.vocab_size)]
        return [math.log(weight / sum(weights)) for weight in weights]

    def submit(self, token_ids: list[int], params: SamplingParams) -> "OneToken":
        assert params.max_tokens == 1
        self.num_steps += 1
        self.num_open += 1
        logprobs = self.logprobs([*PROMPT, *token_ids])
        order = sorted(range(self.vocab_size), key=lambda i: -logprobs[i])[: params.logprobs]
        tops = [logprobs[i] for i in order]
        return OneToken(self, TokenLogprobs(order[0], tops[0], 1, order, tops))


class OneToken:
    num_unread = 0

    def __init__(self, model: TinyModel, entry: TokenLogprobs) -> None:
        self._model = model
        self._entry = entry
        self._is_open = True

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        await asyncio.sleep(0)
        reason = FinishReason.LENGTH
        return RequestOutput(1, 0, [self._entry.token_id], reason, None, 16, [self._entry])

    def cancel(self) -> None:
        self._model.num_open -= self._is_open
        self._is_open = False


def options(**fields: Any) -> BeamSearchOptions:
    return BeamSearchOptions(**{"beam_width": 3, "max_tokens": 5, "eos_token_ids": {END}} | fields)


def search(model: TinyModel, wanted: BeamSearchOptions) -> BeamSearchResult:
    return asyncio.run(beam_search(model.submit, wanted))


def sum_of(model: TinyModel, token_ids: tuple[int, ...]) -> float:
    places = range(len(token_ids))
    return sum(model.logprobs([*PROMPT, *token_ids[:i]])[token_ids[i]] for i in places)


def all_outputs(model: TinyModel, max_tokens: int) -> Iterator[tuple[int, ...]]:
    for length in range(1, max_tokens + 1):
        for output in itertools.product(range(model.vocab_size), repeat=length):
            is_ended = output[-1] == END
            if END not in output[:-1] and (is_ended or length == max_tokens):
                yield output


@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_a_search_as_wide_as_the_tree_finds_the_best_outputs(length_penalty: float) -> None:
    """Three tokens deep over three tokens, no prefix is ever cut."""
    for seed in range(10):
        model = TinyModel(seed, vocab_size=3)
        wanted = options(beam_width=9, max_tokens=3, length_penalty=length_penalty)

        def score(output: tuple[int, ...], model: TinyModel = model) -> float:
            length = max(1, len(output) - (output[-1] == END))
            return sum_of(model, output) / length**length_penalty

        best = sorted(all_outputs(model, 3), key=score, reverse=True)[:9]
        found = search(model, wanted)
        assert [tuple(beam.token_ids) for beam in found.beams] == best
        for beam in found.beams:
            assert beam.cumulative_logprob == pytest.approx(sum_of(model, tuple(beam.token_ids)))
            has_ended = beam.token_ids[-1] == END
            assert beam.finish_reason == (FinishReason.STOP if has_ended else FinishReason.LENGTH)
        assert found.num_cached_tokens == 16
        assert model.num_open == 0


def plain_search(model: TinyModel, wanted: BeamSearchOptions) -> list[tuple[int, ...]]:
    """Beam search to the last token, without any bound on what has ended."""
    beams: list[tuple[int, ...]] = [()]
    ended: list[tuple[int, ...]] = []
    width = wanted.beam_width
    for _ in range(wanted.max_tokens):
        grown = []
        for beam in beams:
            logprobs = model.logprobs([*PROMPT, *beam])
            order = sorted(range(model.vocab_size), key=lambda i: -logprobs[i])
            grown += [(*beam, i) for i in order[: 2 * width]]
        grown.sort(key=lambda beam: -sum_of(model, beam))
        ended += [beam for beam in grown if beam[-1] == END]
        beams = [beam for beam in grown if beam[-1] != END][:width]
    ended += beams

    def score(output: tuple[int, ...]) -> float:
        length = max(1, len(output) - (output[-1] == END))
        return sum_of(model, output) / length**wanted.length_penalty

    return sorted(ended, key=score, reverse=True)[:width]


@pytest.mark.parametrize("length_penalty", [-2.0, 0.0, 1.0, 3.0])
def test_to_stop_when_no_beam_can_get_better_changes_no_result(length_penalty: float) -> None:
    num_steps, num_plain_steps = 0, 0
    for seed in range(15):
        model = TinyModel(seed, vocab_size=5)
        wanted = options(beam_width=2, max_tokens=8, length_penalty=length_penalty)
        found = search(model, wanted)
        assert [tuple(beam.token_ids) for beam in found.beams] == plain_search(model, wanted)
        num_steps += model.num_steps
        num_plain_steps += 1 + 2 * 7
    assert num_steps <= num_plain_steps
    if length_penalty <= 0:
        assert num_steps < num_plain_steps


def test_early_stopping_ends_at_as_many_beams_as_the_width() -> None:
    """It never needs more steps than a search without it."""
    for seed in range(10):
        early, full = TinyModel(seed, 5), TinyModel(seed, 5)
        wanted = options(max_tokens=12, length_penalty=3.0)
        found = search(early, wanted._replace(early_stopping=True)).beams
        search(full, wanted)
        assert all(beam.finish_reason is FinishReason.STOP for beam in found)
        assert early.num_steps < full.num_steps


def test_a_search_without_some_tokens_is_that_of_the_other_tokens() -> None:
    """Most of the suppressed tokens are among the most likely ones somewhere."""
    for seed in range(20):
        model = TinyModel(seed, vocab_size=9)
        wanted = options(beam_width=2, suppressed_token_ids={3, 4, 5})
        found = search(model, wanted)

        def other_tokens(token_ids: list[int], model: TinyModel = model) -> list[float]:
            logprobs = TinyModel.logprobs(model, token_ids)
            return [-math.inf if i in {3, 4, 5} else logprobs[i] for i in range(9)]

        model.logprobs = other_tokens  # type: ignore[method-assign]
        assert [tuple(beam.token_ids) for beam in found.beams] == plain_search(model, wanted)


def test_beams_end_at_their_ends_and_have_candidates() -> None:
    model = TinyModel(1)
    without = search(model, options(eos_token_ids=frozenset(), num_logprobs=2)).beams
    assert all(len(beam.token_ids) == 5 for beam in without)
    for beam in without:
        assert [entry.token_id for entry in beam.logprobs] == beam.token_ids
        assert all(len(entry.top_ids) == 2 for entry in beam.logprobs)
        total = sum(entry.logprob for entry in beam.logprobs)
        assert beam.cumulative_logprob == pytest.approx(total)
    own = search(model, options(eos_token_ids=frozenset(), stop_token_ids=frozenset({1}))).beams
    ended = [beam for beam in own if beam.token_ids[-1] == 1]
    assert ended
    assert all((b.finish_reason, b.stop_token_id) == (FinishReason.STOP, 1) for b in ended)


def test_a_failure_reaches_all_readers_and_leaves_no_request_open() -> None:
    model = TinyModel(2)
    failure = InvalidRequest(RequestError(ErrorCode.INVALID, "no"))

    def submit(token_ids: list[int], params: SamplingParams) -> OneToken:
        if model.num_steps == 5:
            raise failure
        return model.submit(token_ids, params)

    async def read() -> list[object]:
        streams = BeamSearch(submit, options()).streams()
        return await asyncio.gather(*(anext(s) for s in streams), return_exceptions=True)

    assert asyncio.run(read()) == [failure] * 3
    assert model.num_open == 0


@pytest.mark.parametrize("fails", [False, True])
def test_a_search_that_is_cancelled_ends_its_readers_and_its_requests(fails: bool) -> None:
    model = TinyModel(3)
    error = RequestFailed(RequestError(ErrorCode.DEADLINE, "late"))

    async def read() -> list[object]:
        streams = BeamSearch(model.submit, options(max_tokens=10**6)).streams()
        reading = asyncio.gather(*(anext(s) for s in streams), return_exceptions=True)
        while model.num_steps < 50:
            await asyncio.sleep(0)
        if fails:
            streams[0].fail(error)
        else:
            streams[0].cancel()
        return await reading

    results = asyncio.run(read())
    if fails:
        assert results == [error] * 3
    else:
        assert all(isinstance(result, StopAsyncIteration) for result in results)
    assert model.num_open == 0


def test_a_score_is_divided_by_a_power_of_the_length_without_the_end() -> None:
    beam = Beam([1, 2, END], [], -6.0, FinishReason.STOP)
    assert [beam.score(penalty) for penalty in (0.0, 1.0, 2.0, -1.0)] == [-6.0, -3.0, -1.5, -12.0]
    assert Beam([END], [], -6.0, FinishReason.STOP).score(1.0) == -6.0


# Over HTTP ----------------------------------------------------------------------------------------


def counting(add: AddRequest) -> Iterator[RequestOutput]:
    """Answer so that a letter's two successors are likely, and EOS after f."""
    params = add.sampling_params
    assert params.max_tokens == 1
    last = add.prompt_token_ids[-1]
    ids = [last + 1, last + 2, 10, 11, 12, 13, 14, 15, 16, 17]
    if last >= FIRST_BYTE_ID + ord("f"):
        ids[0] = EOS_ID
    tops = ids[: params.logprobs], [-0.5 - i for i in range(10)][: params.logprobs]
    entry = TokenLogprobs(ids[0], -0.5, 1, *tops)
    reason = FinishReason.LENGTH
    yield RequestOutput(add.request_id, 0, [ids[0]], reason, None, 0, [entry])


@pytest.fixture
def live(make_server: MakeServer) -> LiveServer:
    return make_server(FakeClient(script=counting))


def test_completions_and_chats_return_all_beams(live: LiveServer) -> None:
    body = {"use_beam_search": True, "n": 3, "max_tokens": 9, "logprobs": 1}
    answer = httpx.post(live.url + COMPLETIONS, json=body | {"prompt": ["a", "c"]}).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert texts[0] == "bcdef"
    assert texts[3] == "def"
    assert len({*texts[:3]}) == 3
    first = answer["choices"][0]
    assert (first["finish_reason"], first["stop_reason"]) == ("stop", None)
    assert first["logprobs"]["token_logprobs"] == [-0.5] * 6
    assert answer["usage"]["prompt_tokens"] == 2
    assert answer["usage"]["completion_tokens"] > 6 * 3
    del body["logprobs"]
    messages = [{"role": "user", "content": "x"}]
    chat = httpx.post(live.url + "/v1/chat/completions", json=body | {"messages": messages}).json()
    assert len(chat["choices"]) == 3
    assert live.client.num_open_requests == 0


def test_a_search_that_has_begun_is_not_refused(live: LiveServer) -> None:
    """The queue is full after its first step, for all other requests."""

    def fill(add: AddRequest) -> Iterator[RequestOutput]:
        live.client.refusal = Overloaded(RequestError(ErrorCode.OVERLOADED, "the queue is full"))
        yield from counting(add)

    live.client.script = fill
    body = {"prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 4}
    assert httpx.post(live.url + COMPLETIONS, json=body).status_code == 200
    assert [add.resent for add in live.client.requests[:3]] == [False, True, True]
    assert httpx.post(live.url + COMPLETIONS, json=body).status_code == 429
    assert (
        'request_success_total{finished_reason="abort",model_name="null"} 0.0'
        in httpx.get(live.url + "/metrics").text
    )


def test_a_search_whose_last_replica_leaves_meanwhile_is_refused_for_now(
    live: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The facts are known no more when its prompt is tokenized."""
    encode = live.state.text.encode

    async def leave(*args: Any, **options: Any) -> Any:
        live.client.facts = None
        return await encode(*args, **options)

    monkeypatch.setattr(live.state.text, "encode", leave)
    body = {"prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 4}
    response = httpx.post(live.url + COMPLETIONS, json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "starting")


def test_a_client_that_leaves_and_a_deadline_end_the_search(live: LiveServer) -> None:
    live.client.is_paused = True
    body = {"prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 400, "timeout": 0.2}
    late = httpx.post(live.url + COMPLETIONS, json=body)
    assert (late.status_code, late.json()["error"]["param"]) == (504, "timeout")
    wait_until(lambda: not live.client.num_open_requests)
    del body["timeout"]
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(live.url + COMPLETIONS, json=body, timeout=0.3)
    wait_until(lambda: not live.client.num_open_requests)
    wait_until(lambda: len(live.state.open_requests) == 0)


def test_suppressed_tokens_of_the_checkpoint_are_in_no_beam(live: LiveServer) -> None:
    """The likeliest token after "a" is "b", and "d" after "c"."""
    suppressed = [FIRST_BYTE_ID + ord(letter) for letter in "bd"]
    live.state.text.defaults = SamplingDefaults(suppress_tokens=suppressed)
    body = {"prompt": "a", "use_beam_search": True, "n": 2, "max_tokens": 3}
    choices = httpx.post(live.url + COMPLETIONS, json=body).json()["choices"]
    assert choices[0]["text"] == "cef"
    assert {*"bd"}.isdisjoint("".join(choice["text"] for choice in choices))
    response = httpx.post(live.url + COMPLETIONS, json=body | {"n": 10})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == (
        "n: is 10 beams, more than 9 for a checkpoint that suppresses 2 tokens"
    )
    many = SamplingDefaults(suppress_tokens=list(range(20)))
    live.state.text.defaults = many
    response = httpx.post(live.url + COMPLETIONS, json=body)
    assert "not possible: the checkpoint suppresses 20 tokens" in response.text
    with pytest.raises(InvalidRequest, match="beam_width: beam search is not possible"):
        BeamSearchParams(beam_width=2, max_tokens=3).check(many.suppressed(1000, None))


def test_what_could_not_run_to_its_end_is_refused_at_once(live: LiveServer) -> None:
    body = {"prompt": "a" * 300, "use_beam_search": True, "n": 2, "max_tokens": 400}
    response = httpx.post(live.url + COMPLETIONS, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "max_tokens")
    assert not live.client.requests
