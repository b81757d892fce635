"""Finds stop strings in text that arrives in pieces, and holds back text that may become one."""

from collections.abc import Sequence


class StopMatcher:
    """Matches all stop strings in parallel, character by character.

    The first stop string to be complete wins, or the longest one if several end at the same place,
    so the result does not depend on how the text is split into pieces.
    """

    def __init__(self, stops: Sequence[str], *, include_in_output: bool) -> None:
        self.matched: str | None = None
        self._patterns = [_Pattern(stop) for stop in sorted(stops, key=len, reverse=True)]
        self._include = include_in_output
        self._held = ""

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Add the next piece and return the text that can be shown. A match ends the input.

        Without `may_match`, stop strings that end in this piece are ignored; one that only begins
        in it may match later.
        """
        assert self.matched is None
        ends = (pattern.push(text, may_match=may_match) for pattern in self._patterns)
        end = min(ends, default=len(text) + 1)
        buffer = self._held + text
        if end <= len(text):
            self.matched = next(p.text for p in self._patterns if p.end == end)
            cut = len(self._held) + end
            self._held = ""
            return buffer[: cut if self._include else cut - len(self.matched)]
        num_held = max((pattern.num_matched for pattern in self._patterns), default=0)
        shown = len(buffer) - num_held
        self._held = buffer[shown:]
        return buffer[:shown]

    def flush(self) -> str:
        """Return the text that is still held back, at the end of the input."""
        held, self._held = self._held, ""
        return held


class _Pattern:
    """A stop string with its Knuth-Morris-Pratt state."""

    __slots__ = ("_fallbacks", "end", "num_matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.num_matched = 0
        """Length of the longest prefix of the stop string with which the text ends."""
        self.end = 0
        self._fallbacks = [0]
        """For each prefix of the stop string, the length of its longest proper prefix that is also
        its suffix. The list grows with `num_matched`: a request may have 128 sequences with 64 long
        stop strings each, most of which never match more than a few characters."""

    def push(self, piece: str, *, may_match: bool) -> int:
        """Return the position in `piece` at which the stop string ends, or `len(piece) + 1`."""
        self.end = len(piece) + 1
        matched = self.num_matched
        text = self.text
        start = 0
        if not matched:
            start = piece.find(text[0])
            if start < 0:
                return self.end
        for i in range(start, len(piece)):
            character = piece[i]
            while matched and text[matched] != character:
                matched = self._fallback(matched)
            if text[matched] == character:
                matched += 1
                if matched == len(text):
                    if may_match:
                        self.end = i + 1
                        return self.end
                    matched = self._fallback(matched)
        self.num_matched = matched
        return self.end

    def _fallback(self, matched: int) -> int:
        """Return how much is still matched if the character after `matched` ones does not."""
        text, known = self.text, self._fallbacks
        for i in range(len(known), matched):
            length = known[-1]
            while length and text[i] != text[length]:
                length = known[length - 1]
            known.append(length + 1 if text[i] == text[length] else length)
        return known[matched - 1]
