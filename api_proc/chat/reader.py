"""Reads a text that arrives in pieces, for parsers written as generators.

A generator yields when it needs more text. What it has passed on by then depends only on the text
so far and not on how that was cut, because a choice is made only once no later character can
change it.
"""

import re
from collections.abc import Callable, Generator
from functools import lru_cache
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Emit = Callable[[str], None]

SPACE = " \t\r\n"
BLANK = SPACE + "\v\f"
"""What may precede a marker: the white space that `bytes.strip` knows too, so that all that counts
tokens of reasoning finds the same place."""
_NAME = re.compile(r"[\w.:/-]*", re.ASCII)
_OUTSIDE_STRINGS = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
_AFTER_SCALAR = re.compile(r"[\s,;}\]]")


class _Markers(NamedTuple):
    """A set of markers, compiled."""

    pattern: re.Pattern[str]
    prefixes: tuple[str, ...]
    """All proper prefixes, longest first."""
    first_characters: frozenset[str]
    max_held: int


@lru_cache(256)
def _compiled(markers: tuple[str, ...]) -> _Markers:
    longest_first = sorted(markers, key=len, reverse=True)
    never = r"(?!)"
    pattern = re.compile("|".join(map(re.escape, longest_first)) or never)
    prefixes = {marker[:n] for marker in markers for n in range(1, len(marker))}
    ordered = tuple(sorted(prefixes, key=len, reverse=True))
    return _Markers(
        pattern,
        ordered,
        frozenset(marker[0] for marker in markers),
        max(map(len, ordered), default=0),
    )


class TextReader:
    """The text that was received and not read yet."""

    def __init__(self) -> None:
        self._text = ""
        self._is_ended = False
        self._record: list[str] | None = None

    def push(self, text: str) -> None:
        self._text += text

    def end(self) -> None:
        """Mark the end of the text; nothing more will be pushed."""
        self._is_ended = True

    def start_record(self, marker: str) -> None:
        """Keep the text from here on, so that a parser can give it back; see `take_record`."""
        self._record = [marker]

    def take_record(self) -> str:
        """Stop to record, and return the text since the start."""
        record, self._record = self._record, None
        return "".join(record or [])

    def drop_record(self) -> None:
        self._record = None

    def take(self, count: int) -> str:
        """Consume characters that have arrived."""
        taken = self._text[:count]
        self._text = self._text[count:]
        if self._record is not None:
            self._record.append(taken)
        return taken

    def take_all(self) -> str:
        """Consume all that has arrived."""
        return self.take(len(self._text))

    def give_back(self, text: str) -> None:
        """Undo the consumption of the last characters."""
        self._text = text + self._text
        if self._record is not None and text:
            record = "".join(self._record)
            self._record = [record[: len(record) - len(text)]]

    def skip(self, characters: str = SPACE) -> Reading[str]:
        """Consume these characters; return the next one without consuming it, "" at the end."""
        while True:
            rest = self._text.lstrip(characters)
            self.take(len(self._text) - len(rest))
            if rest or self._is_ended:
                return rest[:1]
            yield

    def until(self, markers: tuple[str, ...], emit: Emit) -> Reading[str]:
        """Pass on the text before the first marker; return the marker, "" at the end.

        Only a text that may be the start of a marker is held back.
        """
        compiled = _compiled(markers)
        while True:
            text = self._text
            held = len(text) if self._is_ended else _held_from(text, compiled)
            found = compiled.pattern.search(text)
            if found is not None and (found.start() < held or self._is_ended):
                if found.start():
                    emit(self.take(found.start()))
                return self.take(len(found[0]))
            if held:
                emit(self.take(held))
            if self._is_ended:
                return ""
            yield

    def name(self) -> Reading[str]:
        """Consume the characters of a tool's name."""
        pieces: list[str] = []
        while True:
            found = _NAME.match(self._text)
            assert found is not None
            pieces.append(self.take(found.end()))
            if self._text or self._is_ended:
                return "".join(pieces)
            yield

    def starts_with(self, marker: str) -> Reading[bool]:
        """Consume a marker, and white space before it, if the text begins with these."""
        while True:
            text = self._text.lstrip(BLANK)
            if text.startswith(marker):
                self.take(len(self._text) - len(text) + len(marker))
                return True
            if self._is_ended or not marker.startswith(text):
                return False
            yield

    def json_string(self) -> Reading[str | None]:
        """Consume the JSON text of a string; None if there is not one, or not all of it."""
        pieces: list[str] = []
        if (yield from self.skip()) != '"':
            return None
        is_complete = yield from self.json_value(pieces.append)
        return "".join(pieces) if is_complete else None

    def json_value(self, emit: Emit) -> Reading[bool]:
        """Pass on the text of a JSON value as it arrives; False if the text ends before it."""
        first = yield from self.skip()
        if first not in ('"', "{", "["):
            return (yield from self._scalar(emit))
        depth, is_string = 0, False
        start = 0  # where to search: after an escaped character, which may not have arrived yet
        while True:
            text = self._text
            end = 0
            while start < len(text):
                found = (_IN_STRING if is_string else _OUTSIDE_STRINGS).search(text, start)
                if found is None:
                    start = len(text)
                    break
                character = found[0]
                start = found.end()
                if character == "\\":
                    start += 1
                    continue
                if character == '"':
                    is_string = not is_string
                else:
                    depth += 1 if character in "{[" else -1
                if depth == 0 and not is_string:
                    end = start
                    break
            if end:
                emit(self.take(end))
                return True
            if text:
                emit(self.take(len(text)))
                start -= len(text)
            if self._is_ended:
                return False
            yield

    def _scalar(self, emit: Emit) -> Reading[bool]:
        while True:
            found = _AFTER_SCALAR.search(self._text)
            if found is not None or self._is_ended:
                end = len(self._text) if found is None else found.start()
                emit(self.take(end))
                return found is not None and end > 0
            if self._text:
                emit(self.take(len(self._text)))
            yield


def _held_from(text: str, markers: _Markers) -> int:
    """Return where the longest end of `text` that may become a marker begins."""
    tail = text[-markers.max_held :] if markers.max_held else ""
    if markers.first_characters.isdisjoint(tail):
        return len(text)
    prefix = next((p for p in markers.prefixes if tail.endswith(p)), "")
    return len(text) - len(prefix)
