"""Options of sequences: the best of several, thinking budgets, repetitions, progress of prompts."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from api_proc.chat.reasoning_counter import ReasoningCounter
from api_proc.text.processor import TextProcessor
from protocol.api_core import AddRequest, RequestOutput
from protocol.config.settings import configure
from protocol.sampling import FinishReason, RepetitionDetection, SamplingParams, ThinkingBudget
from tests.api.conftest import MakeServer
from tests.api.fake_engine import (
    EOS_ID,
    FACTS,
    FakeClient,
    LiveServer,
    emitting,
    ids_of,
    logprobs_of,
    repeating,
    wait_until,
)
from tests.system.scripted_model import write_tokenizer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
USER = {"messages": [{"role": "user", "content": "hi"}]}
REASONING = "<think>\nWhich one?\n</think>\n\nThis."


def events_of(live: LiveServer, path: str, **body: Any) -> list[dict[str, Any]]:
    text = httpx.post(live.url + path, json=body | {"stream": True}, timeout=20).text
    assert text.endswith("data: [DONE]\n\n")
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


# best_of ------------------------------------------------------------------------------------------


def ranked(add: AddRequest) -> Iterator[RequestOutput]:
    """Emit a letter by seed, with a log-probability that a longer text has more than once."""
    params = add.sampling_params
    seed = params.seed % 100
    token_ids = [*ids_of("abcdefgh"[seed] * (1 + seed % 3)), EOS_ID]
    mean = -[4.0, 2.0, 0.3, 0.45, 0.5, 6.0, 0.25, 7.0][seed]
    assert params.logprobs is not None
    plain = [logprobs_of(token_id, params.logprobs) for token_id in token_ids]
    entries = [msgspec.structs.replace(entry, logprob=mean) for entry in plain]
    yield RequestOutput(add.request_id, 0, token_ids, FinishReason.STOP, logprobs=entries)


def test_the_most_likely_sequences_are_returned(make_server: MakeServer) -> None:
    """Means are compared, so lengths make no difference. No logprobs are sent unless asked for."""
    live = make_server(FakeClient(script=ranked))
    body = {"prompt": ["x", "y"], "n": 2, "best_of": 7, "seed": 0, "max_tokens": 9}
    answer = httpx.post(live.url + COMPLETIONS, json=body).json()
    assert [choice["text"] for choice in answer["choices"]] == ["g", "ccc", "g", "ccc"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    seeds = [add.sampling_params.seed for add in live.client.requests]
    assert seeds == [*range(7)] * 2
    num_each = sum(len("abcdefgh"[seed] * (1 + seed % 3)) + 1 for seed in range(7))
    assert answer["usage"]["completion_tokens"] == 2 * num_each
    assert answer["usage"]["prompt_tokens"] == 2
    more = httpx.post(live.url + COMPLETIONS, json=body | {"logprobs": 1, "echo": False}).json()
    assert more["choices"][1]["logprobs"]["token_logprobs"] == [-0.3] * 4
    chat = httpx.post(live.url + CHAT, json=USER | {"best_of": 5, "seed": 0}).json()
    assert [choice["message"]["content"] for choice in chat["choices"]] == ["ccc"]


def test_prompts_times_best_of_are_bounded(make_server: MakeServer) -> None:
    live = make_server()
    body = {"prompt": ["x"] * 20, "n": 1, "best_of": 128, "max_tokens": 1}
    response = httpx.post(live.url + COMPLETIONS, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "prompt")
    assert "best_of" in response.json()["error"]["message"]


# Thinking -----------------------------------------------------------------------------------------


def params_of(live: LiveServer, path: str, **body: Any) -> SamplingParams:
    response = httpx.post(live.url + path, json=body)
    assert response.status_code == 200, response.text
    return live.client.requests[-1].sampling_params


def test_a_budget_has_the_markers_of_the_model(make_server: MakeServer) -> None:
    """An open prompt needs no marker at the beginning of the output."""
    live = make_server(reasoning_parser="qwen3")
    begin, end = ids_of("<think>"), ids_of("</think>")
    budget = params_of(live, COMPLETIONS, prompt="x", thinking_token_budget=7).thinking_budget
    spaces = sorted(ids_of(" \t\n\v\f\r"))
    assert budget == ThinkingBudget(7, begin, end, [], spaces)
    for path, body in (
        (COMPLETIONS, {"prompt": "x<think>\n"}),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}),
    ):
        budget = params_of(live, path, thinking_token_budget=0, **body).thinking_budget
        is_open = path == COMPLETIONS
        markers = ([], end, [], []) if is_open else (begin, end, [], spaces)
        assert budget == ThinkingBudget(0, *markers)
    for value in (-1, None):
        params = params_of(live, CHAT, thinking_token_budget=value, **USER)
        assert params.thinking_budget is None


def test_a_marker_of_a_checkpoint_must_be_a_token(tmp_path: Path, make_server: MakeServer) -> None:
    for added, status in ((["<think>", "</think>"], 200), ([], 400)):
        directory = tmp_path / str(status)
        directory.mkdir()
        write_tokenizer(directory, "{{ messages }}<think>\n", ["</s>", *added])
        text = TextProcessor.load(configure(model="null", tokenizer=str(directory)).model)
        with LiveServer(configure(model="null"), FakeClient(), text) as live:
            body = USER | {"thinking_token_budget": 3}
            response = httpx.post(live.url + CHAT, json=body)
            assert response.status_code == status, response.text
            if status == 200:
                budget = live.client.requests[-1].sampling_params.thinking_budget
                end = text.tokenizer.added_token_id("</think>")
                assert budget == ThinkingBudget(3, [], [end])
            else:
                assert response.json()["error"]["param"] == "thinking_token_budget"


@pytest.mark.parametrize("per_output", [1, 3, 100])
def test_usage_counts_the_tokens_of_reasoning(make_server: MakeServer, per_output: int) -> None:
    """Pieces of the output make no difference; a model without reasoning has no such number."""
    script = emitting([*ids_of(REASONING), EOS_ID], per_output=per_output)
    live = make_server(FakeClient(script=script), reasoning_parser="qwen3")
    usage = httpx.post(live.url + CHAT, json=USER | {"n": 2}).json()["usage"]
    num_reasoning = len("\nWhich one?\n</think>")
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * num_reasoning}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events_of(live, CHAT, **USER, stream_options=options)
    counts = [chunk["usage"]["completion_tokens_details"]["reasoning_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[-1] == num_reasoning
    plain = make_server(FakeClient(script=script))
    assert (
        "completion_tokens_details" not in httpx.post(plain.url + CHAT, json=USER).json()["usage"]
    )


@pytest.mark.parametrize(
    ("text", "is_open", "repeats", "expected"),
    [
        ("ab</t>cd", True, False, 6),
        ("ab</t>c</t>", True, False, 6),
        ("  <t>ab</t>cd<t>e</t>", False, False, 6),
        ("x<t>ab</t>", False, False, 0),
        ("<t>ab", False, False, 2),
        ("<t>ab[c]d", False, False, 5),
        ("x<t>ab</t>cd<t>e</t>f", False, True, 6 + 5),
    ],
)
def test_tokens_of_reasoning_are_counted_in_any_pieces(
    text: str, is_open: bool, repeats: bool, expected: int
) -> None:
    for size in (1, 2, 50):
        counter = ReasoningCounter(
            lambda token_id: bytes([token_id]),
            "<t>",
            ("</t>", "[c]"),
            is_open=is_open,
            repeats=repeats,
        )
        data = list(text.encode())
        for start in range(0, len(data), size):
            counter.push(data[start : start + size])
        assert counter.num_tokens == expected


# Repetitions --------------------------------------------------------------------------------------


def test_a_repetition_has_a_separate_reason(make_server: MakeServer) -> None:
    def script(add: AddRequest) -> Iterator[RequestOutput]:
        yield RequestOutput(add.request_id, 0, ids_of("abab"), FinishReason.REPETITION)

    live = make_server(FakeClient(script=script))
    detection = {"max_pattern_size": 2, "min_count": 2}
    body = {"repetition_detection": detection}
    answer = httpx.post(live.url + COMPLETIONS, json={"prompt": "x"} | body).json()
    [choice] = answer["choices"]
    assert choice["text"] == "abab"
    assert (choice["finish_reason"], choice["stop_reason"]) == ("repetition", "repetition_detected")
    assert live.client.requests[-1].sampling_params.repetition_detection == RepetitionDetection(
        2, 1, 2
    )
    [*_, last] = events_of(live, CHAT, **USER, **body)
    assert last["choices"][0]["finish_reason"] == "repetition"
    off = params_of(live, COMPLETIONS, prompt="x", repetition_detection={"max_pattern_size": 0})
    assert off.repetition_detection is None


# The prompt ---------------------------------------------------------------------------------------


def with_progress(add: AddRequest) -> Iterator[RequestOutput]:
    """Report two parts of the prompt, one of them again, as after a restart of the core."""
    if add.sampling_params.return_progress:
        for num_computed in (16, 32, 16):
            num_cached = len(add.prompt_token_ids) // 16 * 16
            yield RequestOutput(
                add.request_id, 0, [], None, None, num_cached, num_computed_tokens=num_computed
            )
    yield from repeating()(add)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("interval", [None, 4])
def test_a_stream_reports_the_progress_of_its_prompt(
    make_server: MakeServer, path: str, interval: int | None
) -> None:
    """Reports come before the first text, once for all sequences, and never go backwards."""
    live = make_server(FakeClient(script=with_progress))
    prompt = {"prompt": "x" * 48} if path == COMPLETIONS else USER
    body = {"return_progress": True, "n": 2, "max_tokens": 9, "stream_interval": interval}
    chunks = events_of(live, path, **prompt, **body)
    places = [i for i, chunk in enumerate(chunks) if "prompt_progress" in chunk]
    found = [chunks[i]["prompt_progress"] for i in places]
    total = 48 if path == COMPLETIONS else len("user: hi\nassistant: ")
    numbers = [progress["processed"] for progress in found]
    assert numbers == [16, 32, total]
    assert {(p["total"], p["cache"]) for p in found} == {(total, total // 16 * 16)}
    assert all(0 <= p["time_ms"] < 20_000 for p in found)
    assert {chunks[i]["choices"][0]["index"] for i in places} == {0}
    texts = [i for i, c in enumerate(chunks) if text_of(c) and c["choices"][0]["index"] == 0]
    assert max(places) < min(texts)
    assert len({text_of(chunk) for chunk in chunks}) > 2
    asked = [add.sampling_params.return_progress for add in live.client.requests]
    assert asked == [True, False]


def text_of(chunk: dict[str, Any]) -> str:
    choice = chunk["choices"][0]
    return str(choice["text"] if "text" in choice else choice["delta"].get("content") or "")


def test_logprobs_of_a_prompt_are_computed_once_also_in_a_stream(make_server: MakeServer) -> None:
    """The first sequence has them; the others wait for it with their first event."""

    def late(add: AddRequest) -> Iterator[RequestOutput]:
        if add.sampling_params.prompt_logprobs is None:
            yield from repeating()(add)
            return
        outputs = list(repeating()(add))
        for _ in range(50):  # turns of the event loop
            yield RequestOutput(add.request_id, 0, [])
        yield from outputs

    live = make_server(FakeClient(script=late))
    body = {"prompt": ["ab", "cd"], "echo": True, "logprobs": 1, "n": 3, "max_tokens": 4}
    streamed: dict[int, list[Any]] = {}
    for event in events_of(live, COMPLETIONS, **body):
        for choice in event["choices"]:
            logprobs = choice["logprobs"]["token_logprobs"]
            streamed.setdefault(choice["index"], []).extend(logprobs)
    asked = [add.sampling_params.prompt_logprobs for add in live.client.requests]
    assert asked == [1, None, None] * 2
    whole = httpx.post(live.url + COMPLETIONS, json=body).json()["choices"]
    assert streamed == {c["index"]: c["logprobs"]["token_logprobs"] for c in whole}
    assert all(len(values) == 6 for values in streamed.values())


def test_a_client_that_leaves_before_the_first_sequence_has_begun_ends_the_others(
    make_server: MakeServer,
) -> None:
    def stuck(add: AddRequest) -> Iterator[RequestOutput]:
        if add.sampling_params.prompt_logprobs is None:
            yield from repeating()(add)

    live = make_server(FakeClient(script=stuck))
    body = {"prompt": "ab", "echo": True, "logprobs": 1, "n": 3, "max_tokens": 400, "stream": True}
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.stream("POST", live.url + COMPLETIONS, json=body, timeout=0.3) as response,
    ):
        list(response.iter_lines())
    wait_until(lambda: len(live.state.open_requests) == 0)


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}, {"n": 2, "logprobs": 0}])
def test_an_echo_without_output_is_the_prompt_alone(
    make_server: MakeServer, fields: dict[str, int]
) -> None:
    """The sampled token is in no field of the answer, even if it ends the sequence."""
    live = make_server(FakeClient(script=emitting([EOS_ID])))
    body = {"prompt": ["ab", "c"], "echo": True, "max_tokens": 0, "return_token_ids": True}
    answer = httpx.post(live.url + COMPLETIONS, json=body | fields).json()
    num_each = fields.get("n", 1)
    assert [choice["text"] for choice in answer["choices"]] == ["ab"] * num_each + ["c"] * num_each
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert all(choice["token_ids"] == [] for choice in answer["choices"])
    usage = answer["usage"]
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, usage["prompt_tokens"])
    if "logprobs" in fields:
        assert answer["choices"][0]["logprobs"]["tokens"] == ["a", "b"]
        assert answer["choices"][0]["logprobs"]["token_logprobs"][0] is None
    assert {add.sampling_params.max_tokens for add in live.client.requests} == {1}
    options = {"include_usage": True}
    events = events_of(live, COMPLETIONS, **body, **fields, stream_options=options)
    choices = [choice for event in events for choice in event["choices"]]
    by_index = sorted(choices, key=lambda choice: choice["index"])
    assert by_index == answer["choices"]
    assert events[-1]["usage"]["completion_tokens"] == 0


def test_no_output_excludes_min_tokens_and_a_prompt_of_the_whole_context(
    make_server: MakeServer,
) -> None:
    live = make_server()
    body = {"prompt": "ab", "echo": True, "max_tokens": 0}
    error = httpx.post(live.url + COMPLETIONS, json=body | {"min_tokens": 3}).json()["error"]
    assert error["message"] == "min_tokens: 3 is greater than max_tokens 0"
    for prompt, status in (
        ([5] * FACTS.max_model_len, 400),
        ([5] * (FACTS.max_model_len - 1), 200),
    ):
        response = httpx.post(live.url + COMPLETIONS, json=body | {"prompt": prompt})
        assert response.status_code == status, response.text


@pytest.mark.parametrize("fields", [{}, {"echo": False}, {"echo": True, "use_beam_search": True}])
def test_no_output_needs_an_echo(make_server: MakeServer, fields: dict[str, bool]) -> None:
    live = make_server()
    response = httpx.post(live.url + COMPLETIONS, json={"prompt": "ab", "max_tokens": 0} | fields)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"
