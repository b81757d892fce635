"""Scans a JSON body in short slices before it is decoded: depth, number of values, names.

Decoding holds the interpreter until it ends, and two bytes become an object of a hundred. So the
values are counted first. The scan does not validate: it is exact for valid JSON, and the decoder
rejects the rest.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from api_proc.errors import ApiError

MAX_DEPTH = 128
MAX_VALUES = 2**16
"""Names and values in one body, without arrays of token ids in the fields for them."""
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)', re.DOTALL)
"""A string, or an unterminated one to the end of the text, so that each character is read once."""
_BRACKETS = re.compile(r"[\[{\]}]")
_SLICE_BYTES = 2**16
_SLICE_TOKENS = 1024
_SHOWN_CHARS = 64

_TOKEN = re.compile(rb'"([^"]*+)"(\s*+:)?|([{\[])|([}\]])|[^"{}\[\]]{1,65536}+')
_SLICE_END = re.compile(rb"\\*+.?", re.DOTALL)
_IDS = re.compile(rb"[\d,\s]*+")
_SPACE = re.compile(rb"\s*+")


class IdRun(NamedTuple):
    """An array of token ids: where it is in the body, and its place in the array around it."""

    start: int
    end: int
    place: int | None


class _Container:
    """An object or array around the present place."""

    __slots__ = ("end_of_bracket", "has_only_ids", "names", "num_ids", "num_inside")

    def __init__(self, names: set[bytes] | None, end_of_bracket: int, has_only_ids: bool) -> None:
        self.names = names
        """The names so far in an object; None: an array."""
        self.end_of_bracket = end_of_bracket
        self.has_only_ids = has_only_ids
        self.num_ids = 0
        self.num_inside = 0
        """Number of containers directly inside it."""


class JsonScan:
    """The structure of one body; it is known when all `steps` are done."""

    def __init__(self, raw: bytes, id_fields: frozenset[bytes]) -> None:
        """`id_fields`: names of the body's fields for arrays of token ids, or of such arrays."""
        self.names: list[bytes] = []
        """Of the body's own fields."""
        self.id_runs: list[IdRun] = []
        self.id_field = ""
        """The field that holds them."""
        self.num_ids = 0
        self._raw = raw
        self._id_fields = id_fields
        self.num_values = 0
        """Names and values, without token ids."""
        self._containers: list[_Container] = []

    def steps(self) -> Iterator[None]:
        """Scan; yields after each slice of about a millisecond. Raises a 400 past a bound."""
        masked = self._raw
        if b"\\" in masked:
            parts: list[bytes] = []
            for part in _without_escapes(masked):
                if parts:
                    yield
                parts.append(part)
            masked = b"".join(parts)
        position = num_tokens = 0
        slice_end = _SLICE_BYTES
        while token := _TOKEN.match(masked, position):
            position = token.end()
            self._take(token)
            num_tokens += 1
            if num_tokens >= _SLICE_TOKENS or position >= slice_end:
                yield
                num_tokens, slice_end = 0, position + _SLICE_BYTES
        if position < len(masked):
            message = "the body is not valid JSON: a string has no end"
            raise ApiError(400, message, code="invalid_json")

    def _take(self, token: re.Match[bytes]) -> None:
        kind = token.lastindex
        if kind is None:  # it holds numbers, literals, commas and white space
            self._take_plain(token.start(), token.end())
        elif kind == 3:
            self._enter(token[3] == b"{", token.end())
        elif kind == 4:
            self._leave(token.start())
        else:
            self._take_value()
            if kind == 2:
                self._take_name(self._raw[token.start(1) : token.end(1)])

    def _take_plain(self, start: int, end: int) -> None:
        num_commas = self._raw.count(b",", start, end)
        around = self._containers[-1] if self._containers else None
        if around is None or not around.has_only_ids:
            self._count(num_commas)
        elif _IDS.fullmatch(self._raw, start, end):
            around.num_ids += num_commas
        else:
            around.num_ids += num_commas
            self._not_only_ids(around)

    def _take_value(self) -> None:
        """Count a string, an array or an object."""
        self._count(1)
        if self._containers:
            self._not_only_ids(self._containers[-1])

    def _not_only_ids(self, around: _Container) -> None:
        if around.has_only_ids:
            around.has_only_ids = False
            self._count(around.num_ids)

    def _take_name(self, name: bytes) -> None:
        names = self._containers[-1].names if self._containers else None
        if names is None:
            return
        if b"\\" in name:
            name = _unescaped(name)
        if name in names:
            shown = name.decode("utf-8", "replace")[:_SHOWN_CHARS]
            message = f"{shown}: the name occurs twice"
            raise ApiError(400, message, param=shown, code="duplicate_name")
        names.add(name)
        if len(self._containers) == 1:
            self.names.append(name)

    def _enter(self, is_object: bool, end_of_bracket: int) -> None:
        self._take_value()
        depth = len(self._containers)
        if depth >= MAX_DEPTH:
            message = f"the JSON body is nested too deeply: more than {MAX_DEPTH} levels"
            raise ApiError(400, message, code="too_deep")
        if depth:
            self._containers[-1].num_inside += 1
        is_in_field = depth == 1 or (depth == 2 and self._containers[-1].names is None)
        is_id_field = is_in_field and bool(self.names) and self.names[-1] in self._id_fields
        has_only_ids = is_id_field and not is_object
        names = set[bytes]() if is_object else None
        self._containers.append(_Container(names, end_of_bracket, has_only_ids))

    def _leave(self, position: int) -> None:
        if not self._containers:
            return
        inner = self._containers.pop()
        if not inner.has_only_ids or _SPACE.fullmatch(self._raw, inner.end_of_bracket, position):
            return
        around = self._containers[-1]
        place = None if len(self._containers) == 1 else around.num_inside - 1
        self.id_runs.append(IdRun(inner.end_of_bracket, position, place))
        self.id_field = self.names[-1].decode()
        self.num_ids += inner.num_ids + 1

    def _count(self, num_values: int) -> None:
        self.num_values += num_values
        if self.num_values > MAX_VALUES:
            message = f"the body has more than {MAX_VALUES} names and values"
            raise ApiError(400, message, code="too_many_values")


def _without_escapes(raw: bytes) -> Iterator[bytes]:
    """Yield the body in slices, with dots for escaped backslashes and quotes.

    A slice ends after a character other than a backslash, so it splits no escape.
    """
    position = 0
    while position < len(raw):
        found = _SLICE_END.match(raw, min(position + _SLICE_BYTES, len(raw)))
        end = len(raw) if found is None else found.end()
        yield raw[position:end].replace(b"\\\\", b"..").replace(b'\\"', b"..")
        position = end


def _unescaped(name: bytes) -> bytes:
    try:
        return msgspec.json.decode(b'"%b"' % name, type=str).encode("utf-8")
    except (msgspec.DecodeError, UnicodeError):
        return name  # the decoder of the body rejects it, too


def max_num_values(text: str) -> int:
    """Return an upper bound of the number of values in a JSON text, without decoding it."""
    count = _num_marks(text)
    return count if count <= MAX_VALUES else _num_marks(_STRING.sub("", text))


def _num_marks(text: str) -> int:
    return text.count(",") + text.count("[") + text.count("{")


def max_depth(text: str) -> int:
    """Return the number of levels of a JSON text, or an upper bound up to `MAX_DEPTH`."""
    num_brackets = text.count("[") + text.count("{")
    if num_brackets <= MAX_DEPTH:
        return num_brackets
    depth = most = 0
    for bracket in _BRACKETS.findall(_STRING.sub("", text)):
        depth += 1 if bracket in "[{" else -1
        most = max(most, depth)
    return most
