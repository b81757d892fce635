"""Stop strings are found exactly, for any division of the text into pieces."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_proc.text.output_sequence import OutputSequence, StopStrings
from api_proc.text.stop import StopMatcher
from api_proc.text.tokenizer import ByteTokenizer, EncodeOptions
from protocol.api_core import RequestOutput
from protocol.client.request_stream import RequestStream
from protocol.core_worker import TokenLogprobs
from protocol.sampling import FinishReason

ABC = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def run(
    pieces: list[str], stops: list[str], *, include: bool = False, num_passed: int = 0
) -> tuple[str, str | None]:
    """Push the pieces, of which the first `num_passed` must not match."""
    matcher = StopMatcher(stops, include_in_output=include)
    shown = ""
    for number, piece in enumerate(pieces):
        shown += matcher.push(piece, may_match=number >= num_passed)
        if matcher.matched is not None:
            return shown, matcher.matched
    return shown + matcher.flush(), None


def reference(text: str, stops: list[str], first: int = 0) -> tuple[str, str | None]:
    """The first stop string to end after `first` characters, the longest of those that do there."""
    for end in range(first + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(ABC, STOPS, st.data())
def test_any_pieces_give_the_reference(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(bounds)]
    num_passed = data.draw(st.integers(0, len(cuts)))
    expected = reference(text, stops, bounds[num_passed])
    assert run(pieces, stops, num_passed=num_passed) == expected


@given(ABC, STOPS)
def test_only_the_prefix_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops, include_in_output=False)
    shown = ""
    for i, character in enumerate(text):
        shown += matcher.push(character)
        if matcher.matched is not None:
            return
        held = text[len(shown) : i + 1]
        assert text[: i + 1] == shown + held
        assert not held or any(stop.startswith(held) for stop in stops)
        assert len(held) < max(map(len, stops))


@pytest.mark.parametrize("include", [False, True])
def test_stop_string_is_shown_on_request(include: bool) -> None:
    shown, matched = run(["one tw", "o thr", "ee"], ["two"], include=include)
    assert (shown, matched) == ("one two" if include else "one ", "two")


def sequence_of(stops: list[str], *, include: bool, min_tokens: int) -> OutputSequence:
    stop = StopStrings(stops, include, min_tokens)
    stream = RequestStream(1, lambda _: None)
    detokenizer = ByteTokenizer().detokenizer([], skip_special_tokens=True)
    return OutputSequence(0, stream, detokenizer, num_prompt_tokens=1, stop=stop)


def ends_at(ids: list[int], stops: list[str], min_tokens: int) -> tuple[str, str | None, int]:
    """Decode ever more tokens, until one past `min_tokens` completes a stop string."""
    tokenizer, before = ByteTokenizer(), 0
    for count in range(1, len(ids) + 1):
        detokenizer = tokenizer.detokenizer([], skip_special_tokens=True)
        text = detokenizer.push(ids[:count])
        text += detokenizer.flush() if count == len(ids) else ""
        shown, matched = reference(text, stops, before if count > min_tokens else len(text))
        if matched is not None:
            return shown, matched, count
        before = len(text)
    return shown, None, len(ids)


@given(st.text("aé🙂\n", min_size=1, max_size=12), st.data())
def test_any_tokens_stop_where_their_text_does(text: str, data: st.DataObject) -> None:
    """Tokens are single bytes, and outputs have any number of them, with and without logprobs."""
    ids = ByteTokenizer().encode(text, EncodeOptions(False, 1000))
    stops = data.draw(st.lists(st.text("aé🙂\n", min_size=1, max_size=4), min_size=1, max_size=3))
    min_tokens = data.draw(st.integers(0, len(ids)))
    sequence = sequence_of(stops, include=False, min_tokens=min_tokens)
    shown, position = "", 0
    while position < len(ids) and sequence.finish_reason != "stop":
        part = ids[position : position + data.draw(st.integers(1, 5))]
        is_last = position + len(part) == len(ids)
        logprobs = [TokenLogprobs(i, -1.0, 1, [], []) for i in part] if len(part) > 2 else None
        reason = FinishReason.LENGTH if is_last else None
        delta = sequence.push(RequestOutput(1, position, part, reason, logprobs=logprobs))
        shown += delta.text
        position += len(delta.token_ids)
    matched = delta.stop_reason
    assert (shown, matched, position) == ends_at(ids, stops, min_tokens)


def test_of_a_long_stop_string_only_what_was_matched_costs_time() -> None:
    """A request may have 128 sequences with 64 of them each."""
    matcher = StopMatcher(["ab" * 500 + "c"], include_in_output=False)
    assert matcher.push("ababab") == ""
    assert matcher.push("b") == "abababb"
    [pattern] = matcher._patterns
    assert len(pattern._fallbacks) <= len("ababab")
