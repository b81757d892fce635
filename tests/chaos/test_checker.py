"""The checker of chaos runs finds every bug that is planted into a recorded stream."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.checker import BREAK_TIMEOUT_S, Excuse, Harm, check_stream, compare
from tests.chaos.history import DONE, History
from tests.chaos.recording import End, Event, Recording
from tests.chaos.reference import reference_problems
from tests.chaos.workload import ChaosRequest

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
    """Two choices, interleaved; neighbours differ, and ids repeat later."""
    ids = [(7 * position) % 11 for position in range(NUM_TOKENS)]
    messages = [event(token_id, index) for token_id in ids for index in (0, 1)]
    for index in (0, 1):
        messages[index - 2]["choices"][0].update(finish_reason="stop", stop_reason="<9>")
    return [*messages, usage(2 * NUM_TOKENS)]


def record(messages: list[Message], end: End = End.DONE, ids: list[str] | None = None) -> Recording:
    """Return a recording with an event every 0.1 s from 0 on; its end comes with the last one."""
    names = [""] * len(messages) if ids is None else ids
    events = [
        Event(0.1 * i, json.dumps(message), name)
        for i, (message, name) in enumerate(zip(messages, names, strict=True))
    ]
    if end is End.DONE:
        events.append(Event(0.1 * len(events), DONE))
    ended_at = events[-1].time if events else 0.0
    return Recording("s", 0.0, 0.0, 200, events=events, end=end, ended_at=ended_at)


def ids_of(messages: list[Message]) -> list[str]:
    """Event ids in Troika's format: the token counts of each choice."""
    counts, names = [0, 0], []
    for message in messages:
        for choice in message["choices"]:
            counts[choice["index"]] += len(choice["token_ids"])
        names.append(f"req.1.{counts[0]}-{counts[1]}" + ("" if message["choices"] else "u"))
    return names


def harms(messages: list[Message], golden: list[Message], end: End = End.DONE) -> set[Harm]:
    return {v.harm for v in check_stream(record(messages, end), record(golden))}


@pytest.mark.parametrize("event", [completion, chat])
def test_equal_streams_are_equal_in_any_pieces(event: Callable[..., Message]) -> None:
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


def found(recording: Recording, golden: list[Message], excuse: Excuse) -> set[Harm]:
    return {violation.harm for violation in check_stream(recording, record(golden), excuse)}


def test_broken_stream_is_lost_unless_the_process_that_held_it_died() -> None:
    """The break must follow the death at once."""
    golden = stream(completion)
    cut = record(golden[:12], End.CUT)
    killed = Excuse([cut.ended_at - 0.01])
    assert found(cut, golden, Excuse()) == {Harm.LOST}
    assert not found(cut, golden, killed)
    for moment in (-1.0, cut.ended_at + 0.01, cut.ended_at - BREAK_TIMEOUT_S - 0.01):
        assert found(cut, golden, Excuse([moment])) == {Harm.LOST}, moment
    wrong = record([*golden[:12], completion(99)], End.CUT)
    assert found(wrong, golden, Excuse([wrong.ended_at])) == {Harm.MISMATCHED}


@pytest.mark.parametrize("end", [End.TIMEOUT, End.UNREACHABLE, End.DECLINED, End.GARBLED])
def test_the_death_of_a_holder_excuses_a_break_only(end: End) -> None:
    """It excuses neither a silent stream nor a refused connection."""
    recording = record(stream(completion)[:12], end)
    assert found(recording, stream(completion), Excuse([recording.ended_at]))


def test_answer_that_breaks_after_done_has_no_end() -> None:
    golden = stream(completion)
    recording = record(golden)
    recording.problem = "no end"
    assert found(recording, golden, Excuse()) == {Harm.LOST}
    assert not found(recording, golden, Excuse([recording.ended_at]))


def test_resumed_stream_must_have_been_broken_by_a_death() -> None:
    """A refused connection or a 503 is excused only if the whole engine died."""
    golden = stream(completion)
    recording = record(golden)
    recording.breaks = [1.0]
    assert not found(recording, golden, Excuse([0.9]))
    assert found(recording, golden, Excuse()) == {Harm.LOST}
    recording.openings, recording.breaks = [0.0, 1.0], [0.95, 1.2]
    assert found(recording, golden, Excuse([0.9])) == {Harm.LOST}, (
        "the second connection had no death"
    )
    assert not found(recording, golden, Excuse([0.9, 1.1]))
    recording.openings, recording.breaks, recording.refusals = [], [], [1.0]
    assert found(recording, golden, Excuse([0.9])) == {Harm.FAILED}
    assert not found(recording, golden, Excuse([0.9], is_away=True))
    recording.refusals, recording.deferrals = [], [429, 503]
    assert found(recording, golden, Excuse([0.9])) == {Harm.FAILED}
    assert not found(recording, golden, Excuse([0.9], is_away=True))
    recording.deferrals = [429]
    assert not found(recording, golden, Excuse())
    recording.breaks, recording.deferrals = [1.0], [503]
    assert not found(recording, golden, Excuse([0.9])), "the journal may have to be read first"


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


def end_early(messages: list[Message]) -> None:
    messages[8]["choices"][0].update(finish_reason="stop", stop_reason="<9>")


def blank(column: str, value: Any) -> Callable[[list[Message]], None]:
    def plant(messages: list[Message]) -> None:
        messages[6]["choices"][0][column] = messages[7]["choices"][0][column] = value

    return plant


PREFIX_BUGS: dict[str, tuple[Callable[[list[Message]], Any], Harm]] = {
    "a choice ends after 5 of 20 tokens": (end_early, Harm.LOST),
    "the last logprobs are missing": (blank("logprobs", None), Harm.LOST),
    "the last text is missing": (blank("text", ""), Harm.LOST),
    "text of more tokens": (lambda m: m[8]["choices"][0].update(token_ids=[]), Harm.MISMATCHED),
    "usage of another": (lambda m: m.append(usage(3)), Harm.MISMATCHED),
}


@pytest.mark.parametrize("bug", PREFIX_BUGS)
def test_planted_bugs_are_found_in_abandoned_streams(bug: str) -> None:
    """Prefixes of tokens, text and logprobs must end together."""
    golden = stream(completion)
    if bug == "text of more tokens":
        for message in golden[:-1]:
            message["choices"][0]["logprobs"] = None
    broken = copy.deepcopy(golden[:9])
    assert not harms(broken, golden, End.LEFT)
    plant, harm = PREFIX_BUGS[bug]
    plant(broken)
    assert harm in harms(broken, golden, End.LEFT)


def test_events_after_the_end_are_found() -> None:
    golden = stream(completion)
    recording = record(golden)
    recording.events += recording.events[-2:]
    assert found(recording, golden, Excuse()) == {Harm.DUPLICATED, Harm.MISMATCHED}
    recording.events[-2:] = recording.events[-1:]  # [DONE] alone, twice
    assert found(recording, golden, Excuse()) == {Harm.DUPLICATED}


def test_repeated_role_is_found_where_the_golden_run_has_one() -> None:
    """Some servers repeat the role in each piece; pieces may be joined."""
    role = chat(1)
    role["choices"][0].update(delta={"role": "assistant", "content": ""}, logprobs=None)
    golden = [role, *stream(chat)]
    again = [*golden[:9], role, *golden[9:]]
    assert harms(again, golden) == {Harm.DUPLICATED}
    assert not harms([*again[:9], *again[10:]], again)


def test_events_of_another_answer_are_found() -> None:
    golden = stream(completion)
    for message in golden:
        message["id"] = "cmpl-1"
    mixed = copy.deepcopy(golden)
    mixed[9]["id"] = "cmpl-2"
    assert harms(mixed, golden) == {Harm.MISMATCHED}


def test_logprobs_are_compared_where_some_columns_are_empty() -> None:
    golden = stream(completion)
    for message in golden[:-1]:
        message["choices"][0]["logprobs"]["top_logprobs"] = None
    broken = copy.deepcopy(golden)
    broken[6]["choices"][0]["logprobs"]["token_logprobs"] = [-99.0]
    assert harms(broken, golden) == {Harm.MISMATCHED}


def test_ids_of_events_count_the_tokens() -> None:
    """A client that resumes with a wrong id would miss tokens, or get some twice."""
    messages = stream(completion)
    ids = ids_of(messages)
    golden = record(messages, ids=ids)
    assert not check_stream(golden, golden)
    ids[7] = "req.1.4-5"
    (violation,) = check_stream(record(messages, ids=ids), golden)
    assert violation.harm is Harm.MISMATCHED
    for message in messages[:-1]:  # also if only the ids have counts
        message["choices"][0]["token_ids"] = []
    names = [*ids_of(stream(completion))[:-1], "req.1.20-19u"]
    plain = record(messages, ids=ids_of(stream(completion)))
    (violation,) = check_stream(record(messages, ids=names), plain)
    assert violation.harm is Harm.MISMATCHED


REQUEST = ChaosRequest(
    "one", "/v1/completions", {"n": 2, "max_tokens": 20, "logprobs": 1, "return_token_ids": True}
)


def finish_at_length(messages: list[Message]) -> list[Message]:
    for message in messages[-3:-1]:
        message["choices"][0].update(finish_reason="length", stop_reason=None)
    return messages


BAD_REFERENCES: dict[str, Callable[[list[Message]], Any]] = {
    "an error": lambda m: m.insert(9, {"error": {"message": "no"}}),
    "no tokens": lambda m: m.__delitem__(slice(0, -1)),
    "a token less than in the usage": lambda m: m.__delitem__(slice(0, 2)),
    "one choice instead of two": lambda m: m.__delitem__(slice(0, -1, 2)),
    "no logprobs": lambda m: [x["choices"][0].update(logprobs=None) for x in m[:-1]],
    "no usage": lambda m: m.pop(),
    "no token ids": lambda m: [x["choices"][0].update(token_ids=[]) for x in m[:-1]],
    "ended by the engine": lambda m: m[-2]["choices"][0].update(finish_reason="abort"),
    "shorter than its usage": lambda m: m.__setitem__(slice(0, None), [*m[4:-1], usage(36)]),
}


@pytest.mark.parametrize("bug", BAD_REFERENCES)
def test_invalid_golden_run_is_rejected(bug: str) -> None:
    messages = finish_at_length(stream(completion))
    assert not reference_problems([REQUEST], [record(messages)])
    BAD_REFERENCES[bug](messages)
    assert reference_problems([REQUEST], [record(messages)])


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
def test_lost_repeated_and_other_characters_are_distinguished(
    actual: str, harm: Harm | None
) -> None:
    assert compare(actual, "abcdef", is_whole=True) is harm


def test_no_two_events_have_the_same_id() -> None:
    golden = record(stream(completion))
    again = record(stream(completion))
    for number, event in enumerate(again.events):
        again.events[number] = Event(event.time, event.data, f"event-{number}")
    assert not check_stream(again, golden)
    again.events[5] = Event(0.5, again.events[5].data, "event-4")
    assert [v.harm for v in check_stream(again, golden)] == [Harm.DUPLICATED]


def test_unreadable_events_are_errors() -> None:
    for text in ("{", "[]", "7", '{"choices":[{}]}', '{"choices":[7]}', '{"usage":[]}'):
        recording = Recording("s", 0.0, events=[Event(0.0, text)])
        assert History(recording).errors == [f"unreadable event {text!r}"]


def delta(token_id: int, **fields: Any) -> Message:
    """An event of a chat with one token, and a delta of any kind."""
    choice = {"index": 0, "delta": fields, "token_ids": [token_id], "finish_reason": None}
    return {"choices": [choice], "usage": None}


def call(index: int, arguments: str, call_id: str | None = None) -> Message:
    """A piece of a call; the first one has an id and a name."""
    piece: Message = {"index": index, "function": {"arguments": arguments}}
    if call_id is not None:
        piece["id"] = call_id
        piece["function"]["name"] = f"f{index}"
    return delta(7, tool_calls=[piece])


def agent(run: str = "a") -> list[Message]:
    """Reasoning, content, and two calls; ids differ between runs."""
    messages = [
        *(delta(n, reasoning_content=f"hm{n} ") for n in range(4)),
        *(delta(n, content=f"so{n} ") for n in range(3)),
        *(call(0, "", f"{run}0"), call(0, '{"x": 1'), call(0, "2}")),
        *(call(1, "", f"{run}1"), call(1, '{"y": 3}')),
    ]
    messages[-1]["choices"][0]["finish_reason"] = "tool_calls"
    return [*messages, usage(len(messages))]


def test_calls_and_reasoning_are_equal_in_any_pieces() -> None:
    golden, other = agent(), agent("b")
    assert not harms(other, golden)
    first, second = other[8], other.pop(9)
    function = first["choices"][0]["delta"]["tool_calls"][0]["function"]
    function["arguments"] += second["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"]
    first["choices"][0]["token_ids"] += second["choices"][0]["token_ids"]
    assert not harms(other, golden)
    for length in range(len(golden)):
        assert not harms(golden[:length], golden, End.LEFT)


AGENT_BUGS: dict[str, Callable[[list[Message]], object]] = {
    "reasoning is lost": lambda m: m[1]["choices"][0]["delta"].clear(),
    "reasoning is repeated": lambda m: m[1]["choices"][0]["delta"].update(
        reasoning_content="hm1 hm1 "
    ),
    "reasoning becomes content": lambda m: m[3]["choices"][0].update(delta={"content": "hm3 "}),
    "arguments are lost": lambda m: m[8]["choices"][0]["delta"].clear(),
    "arguments are repeated": lambda m: m[9]["choices"][0].update(
        delta={"tool_calls": [{"index": 0, "function": {"arguments": "2}2}"}}]}
    ),
    "arguments of another call": lambda m: m[9]["choices"][0]["delta"]["tool_calls"][0].update(
        index=1
    ),
    "another name": lambda m: m[10]["choices"][0]["delta"]["tool_calls"][0]["function"].update(
        name="f2"
    ),
    "a call begins twice": lambda m: m[8]["choices"][0].update(piece_of_call(m[7])),
    "two calls have one id": lambda m: m[10]["choices"][0]["delta"]["tool_calls"][0].update(
        id="a0"
    ),
}


def piece_of_call(message: Message) -> Message:
    return {"delta": copy.deepcopy(message["choices"][0]["delta"])}


@pytest.mark.parametrize("name", AGENT_BUGS)
def test_bugs_in_calls_and_reasoning_are_found(name: str) -> None:
    broken = agent()
    AGENT_BUGS[name](broken)
    assert harms(broken, agent())


def vectors(count: int = 3) -> list[Message]:
    items = [{"index": n, "embedding": [0.1 * n, 1 / 3]} for n in range(count)]
    return [{"data": items, "usage": {"prompt_tokens": 9, "total_tokens": 9}}]


def test_vectors_are_compared() -> None:
    assert not harms(vectors(), vectors())
    assert not harms([], vectors(), End.CUT) - {Harm.LOST}, "the cut itself"
    assert harms(vectors(2), vectors()) >= {Harm.LOST}
    changed = vectors()
    changed[0]["data"][1]["embedding"][1] = 0.33333333333333337
    assert harms(changed, vectors()) == {Harm.MISMATCHED}


def test_a_reference_without_its_vectors_or_calls_is_refused() -> None:
    body: Message = {"input": ["a", "b", "c"]}
    request = ChaosRequest("embedding-0", "/v1/embeddings", body)
    assert reference_problems([request], [record(vectors())]) == []
    assert reference_problems([request], [record(vectors(2))])
    body = {"tool_choice": "required", "max_tokens": 9, "return_token_ids": True}
    request = ChaosRequest("chat-tools-0", "/v1/chat/completions", body)
    assert reference_problems([request], [record(agent())]) == []
    plain = [delta(n, content="x") for n in range(3)]
    plain[-1]["choices"][0]["finish_reason"] = "stop"
    assert reference_problems([request], [record([*plain, usage(3)])])
