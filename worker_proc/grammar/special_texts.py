"""Finds the texts of special tokens in grammars."""

import re
from bisect import bisect_right
from collections.abc import Iterable


class SpecialTexts:
    """The texts of tokens that llguidance matches only by their ids.

    Backslashes are ignored, since grammars escape slashes and quotes.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts: list[str] = []
        """Sorted; a text that begins with another one is left out."""
        for text in sorted({_unescaped(text) for text in texts} - {""}):
            if not self._texts or not text.startswith(self._texts[-1]):
                self._texts.append(text)
        self._max_length = max(map(len, self._texts), default=0)
        first = re.escape("".join(sorted({text[0] for text in self._texts})))
        self._first = re.compile(f"[{first}]" if first else r"\Z.")

    def occur_in(self, grammar: str) -> bool:
        """Return whether a grammar has any of the texts.

        The time depends on the grammar's length, and little on the number of texts.
        """
        grammar = _unescaped(grammar)
        for found in self._first.finditer(grammar):
            start = found.start()
            # The greatest text up to what follows is the only one that can be a prefix of it.
            place = bisect_right(self._texts, grammar[start : start + self._max_length])
            if place and grammar.startswith(self._texts[place - 1], start):
                return True
        return False


def _unescaped(text: str) -> str:
    return text.replace("\\", "")
