"""Stop strings are found exactly, for any division of the text into pieces."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api_proc.text.stop import StopMatcher

ABC = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4)


def run(pieces: list[str], stops: list[str], *, include: bool = False) -> tuple[str, str | None]:
    matcher = StopMatcher(stops, include_in_output=include)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return shown, matcher.matched
    return shown + matcher.flush(), None


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first stop string to be complete, the longest of those that end together."""
    for end in range(1, len(text) + 1):
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
    assert run(pieces, stops) == reference(text, stops)


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


def test_of_a_long_stop_string_only_what_was_matched_costs_time() -> None:
    """A request may have 128 sequences with 64 of them each."""
    matcher = StopMatcher(["ab" * 500 + "c"], include_in_output=False)
    assert matcher.push("ababab") == ""
    assert matcher.push("b") == "abababb"
    [pattern] = matcher._patterns
    assert len(pattern._fallbacks) <= len("ababab")
