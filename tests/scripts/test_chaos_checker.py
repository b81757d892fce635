"""The checker of chaos runs: whatever is planted into a recorded stream, it must find."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from scripts.chaos.checker import Harm, check_stream, compare
from scripts.chaos.history import DONE, History
from scripts.chaos.recording import End, Event, Recording

NUM_TOKENS = 20
Message = dict[str, Any]


def completion(token_id: int, index: int = 0, **more: Any) -> Message:
    """An event of /v1/completions with one token."""
    text = f"<{token_id}>"
    logprobs = {
        "tokens": [text],
        "token_logprobs": [-token_id / 7],
        "top_logprobs": [{text: -token_id / 7}],
        "text_offset": [token_id],
    }
    choice = {"index": index, "text": text, "token_ids": [token_id], "logprobs": logprobs}
    return {"choices": [{**choice, "finish_reason": None, **more}], "usage": None}


def chat(token_id: int, index: int = 0, **more: Any) -> Message:
    """An event of /v1/chat/completions with one token."""
    text = f"<{token_id}>"
    logprobs = {"content": [{"token": text, "logprob": -token_id / 7, "top_logprobs": []}]}
    choice = {"index": index, "delta": {"content": text}, "logprobs": logprobs}
    return {"choices": [{**choice, "finish_reason": None, **more}], "usage": None}


def usage(num_tokens: int) -> Message:
    counts = {"prompt_tokens": 5, "completion_tokens": num_tokens, "total_tokens": 5 + num_tokens}
    return {"choices": [], "usage": {**counts, "prompt_tokens_details": {"cached_tokens": 3}}}


def stream(event: Callable[..., Message]) -> list[Message]:
    """Two choices, interleaved; neighbours differ, and ids come again later."""
    ids = [(7 * position) % 11 for position in range(NUM_TOKENS)]
    messages = [event(token_id, index) for token_id in ids for index in (0, 1)]
    for index in (0, 1):
        messages[index - 2]["choices"][0].update(finish_reason="stop", stop_reason="<9>")
    return [*messages, usage(2 * NUM_TOKENS)]


def record(messages: list[Message], end: End = End.DONE) -> Recording:
    events = [Event(0.1 * i, json.dumps(message)) for i, message in enumerate(messages)]
    if end is End.DONE:
        events.append(Event(0.1 * len(events), DONE))
    return Recording("s", 0.0, accepted_at=0.0, status=200, events=events, end=end)


def harms(messages: list[Message], golden: list[Message], end: End = End.DONE) -> set[Harm]:
    return {v.harm for v in check_stream(record(messages, end), record(golden))}


@pytest.mark.parametrize("event", [completion, chat])
def test_equal_streams_are_equal_however_they_are_cut(event: Callable[..., Message]) -> None:
    """Pieces may be joined, and the number of cached tokens may differ."""
    golden = stream(event)
    assert not harms(golden, golden)
    joined = copy.deepcopy(golden)
    first, other = joined[4]["choices"][0], joined.pop(6)["choices"][0]
    assert first["index"] == other["index"]
    if event is completion:
        first["text"] += other["text"]
        first["token_ids"] += other["token_ids"]
        for name, column in first["logprobs"].items():
            column.extend(other["logprobs"][name])
    else:
        first["delta"]["content"] += other["delta"]["content"]
        first["logprobs"]["content"] += other["logprobs"]["content"]
    joined[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] = 0
    assert not harms(joined, golden)


def drop(messages: list[Message], at: int) -> None:
    del messages[at]


def repeat(messages: list[Message], at: int) -> None:
    messages.insert(at + 2, copy.deepcopy(messages[at]))


def change(messages: list[Message], at: int) -> None:
    messages[at] = completion(99, at % 2)


PLANTED: dict[str, tuple[Callable[[list[Message], int], None], Harm]] = {
    "drop a token": (drop, Harm.LOST),
    "repeat a token": (repeat, Harm.DUPLICATED),
    "change a token": (change, Harm.MISMATCHED),
}


@pytest.mark.parametrize("bug", PLANTED)
@pytest.mark.parametrize("event", [completion, chat])
@pytest.mark.parametrize("at", [0, 1, 2, 15, 30, 37])
def test_planted_token_bugs_are_found_and_named(
    bug: str, event: Callable[..., Message], at: int
) -> None:
    golden = stream(event)
    broken = copy.deepcopy(golden)
    plant, harm = PLANTED[bug]
    if event is chat and plant is change:
        broken[at] = chat(99, at % 2)
    else:
        plant(broken, at)
    assert harm in harms(broken, golden)


def finish(messages: list[Message], **changes: Any) -> None:
    messages[-2]["choices"][0].update(changes)


OTHER_BUGS: dict[str, tuple[Callable[[list[Message]], Any], Harm]] = {
    "no finish": (lambda m: finish(m, finish_reason=None), Harm.LOST),
    "another finish": (lambda m: finish(m, finish_reason="length"), Harm.MISMATCHED),
    "another stop string": (lambda m: finish(m, stop_reason="<8>"), Harm.MISMATCHED),
    "finished twice": (lambda m: m.insert(-1, copy.deepcopy(m[-2])), Harm.DUPLICATED),
    "usage of another": (lambda m: m.append(usage(3)) or m.pop(-2), Harm.MISMATCHED),
    "no usage": (lambda m: m.pop(), Harm.MISMATCHED),
    "usage twice": (lambda m: m.append(m[-1]), Harm.MISMATCHED),
    "an error": (lambda m: m.insert(9, {"error": {"message": "no"}}), Harm.FAILED),
    "a third choice": (lambda m: m.insert(9, completion(5, 2)), Harm.MISMATCHED),
    "a logprob in the last bit": (
        lambda m: m[6]["choices"][0]["logprobs"].update(token_logprobs=[-4 / 7 + 1e-16]),
        Harm.MISMATCHED,
    ),
    "text alone": (lambda m: m[6]["choices"][0].update(text="<x>"), Harm.MISMATCHED),
}


@pytest.mark.parametrize("bug", OTHER_BUGS)
def test_other_planted_bugs_are_found(bug: str) -> None:
    golden = stream(completion)
    broken = copy.deepcopy(golden)
    plant, harm = OTHER_BUGS[bug]
    plant(broken)
    assert harm in harms(broken, golden), harms(broken, golden)


def test_stream_that_is_cut_is_lost_unless_it_may_break() -> None:
    golden = stream(completion)
    cut = record(golden[:12], End.CUT)
    assert {v.harm for v in check_stream(cut, record(golden))} == {Harm.LOST}
    assert not check_stream(cut, record(golden), may_break=True)
    wrong = record([*golden[:12], completion(99)], End.CUT)
    assert {v.harm for v in check_stream(wrong, record(golden), may_break=True)} == {
        Harm.MISMATCHED
    }


def test_stream_that_was_never_accepted_has_failed() -> None:
    declined = Recording("s", 0.0, end=End.DECLINED, problem="status 500")
    (violation,) = check_stream(declined, record(stream(completion)))
    assert violation.harm is Harm.FAILED
    assert "status 500" in violation.detail


def test_client_that_has_left_sees_a_prefix() -> None:
    golden = stream(completion)
    assert not harms(golden[:7], golden, End.LEFT)
    assert harms([*golden[:7], golden[6]], golden, End.LEFT) == {Harm.DUPLICATED}
    assert harms([*golden[:6], golden[8]], golden, End.LEFT) == {Harm.LOST}


@pytest.mark.parametrize(
    ("actual", "harm"),
    [
        ("abcdef", None),
        ("abcde", Harm.LOST),
        ("", Harm.LOST),
        ("abdef", Harm.LOST),
        ("af", Harm.LOST),
        ("abcabcdef", Harm.DUPLICATED),
        ("abcdeff", Harm.DUPLICATED),
        ("abcxef", Harm.MISMATCHED),
        ("abcdefg", Harm.MISMATCHED),
    ],
)
def test_compare(actual: str, harm: Harm | None) -> None:
    assert compare(actual, "abcdef", is_whole=True) is harm


def test_no_two_events_have_the_same_id() -> None:
    golden = record(stream(completion))
    again = record(stream(completion))
    for number, event in enumerate(again.events):
        again.events[number] = Event(event.time, event.data, f"0.{number}")
    assert not check_stream(again, golden)
    again.events[5] = Event(0.5, again.events[5].data, "0.4")
    assert [v.harm for v in check_stream(again, golden)] == [Harm.DUPLICATED]


def test_unreadable_events_are_errors() -> None:
    recording = Recording("s", 0.0, events=[Event(0.0, "{")])
    assert History(recording).errors == ["unreadable event '{'"]
