"""Text in which a user's special tokens stay text.

A chat template writes special tokens around the messages, and the tokenizer cannot distinguish them
from those that a user has typed. So a mark is inserted into each special token of a message before
the template is rendered, and the rendered text is cut at the marks. No piece then contains a
special token of a user, and the pieces are tokenized one by one.
"""

import re
import secrets
from collections.abc import Iterable
from typing import Any

_MARK = str(10**20 + secrets.randbits(64))
"""Digits, which no filter of a template changes; clients cannot guess them."""
_NAME_CHARS = 256
_CHUNK_CHARS = 2**16
"""Regular expressions hold the GIL: texts are searched in chunks of this size."""


class LiteralText(str):
    """A text that is tokenized in `pieces`, which add up to it."""

    pieces: list[str]

    @classmethod
    def from_pieces(cls, pieces: list[str]) -> "LiteralText":
        text = cls("".join(pieces))
        text.pieces = pieces
        return text

    @classmethod
    def from_marked(cls, marked: str) -> "LiteralText":
        """Remove the marks of `SpecialTokens.mark`, and record their positions."""
        return cls.from_pieces(marked.split(_MARK))


class SpecialTokens:
    """The special tokens of a tokenizer, as text."""

    def __init__(self, tokens: Iterable[str]) -> None:
        # One character cannot be cut. The beginning of a very long name suffices to find it.
        names = {token[:_NAME_CHARS] for token in tokens if len(token) > 1}
        self._longest = max(map(len, names), default=0)
        self._search = re.compile(_pattern(names)).search if names else None

    def mark(self, value: Any) -> Any:
        """Return a text, or a JSON object with texts, with its special tokens marked."""
        if self._search is None:
            return value
        if isinstance(value, str):
            return self._marked(value)
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        if isinstance(value, dict):
            return {self.mark(name): self.mark(item) for name, item in value.items()}
        return value

    def literal(self, text: str) -> LiteralText:
        """Return a text whose special tokens all stay text."""
        return LiteralText.from_marked(self.mark(text))

    def _marked(self, text: str) -> str:
        assert self._search is not None
        parts: list[str] = []
        taken = position = 0
        while position < len(text):
            found = self._search(text, position, position + _CHUNK_CHARS + self._longest)
            if found is None:
                position += _CHUNK_CHARS
                continue
            position = found.start() + 1
            parts += (text[taken:position], _MARK)
            taken = position
        return "".join([*parts, text[taken:]]) if parts else text


def _pattern(names: Iterable[str]) -> str:
    """Return an expression for any of these names that compares common prefixes once."""
    by_first: dict[str, set[str]] = {}
    for name in names:
        by_first.setdefault(name[:1], set()).add(name[1:])
    if "" in by_first:  # a name ends here; longer ones need not be found
        return ""
    branches = [re.escape(first) + _pattern(rests) for first, rests in sorted(by_first.items())]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"
