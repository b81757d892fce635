"""Long JSON arrays that are encoded in slices while they are built, and never copied.

The encoder lets no other thread run until it ends, and an answer with log-probabilities has many
megabytes. So its parts are encoded a few at a time, and only bytes are kept of them. The object
that contains an array is encoded with a mark in its place, which the slices then replace.
"""

from msgspec import Raw

from api_proc.http.connection import encode

_SLICE = 64
"""Tokens with 20 candidates each that take about half a millisecond to encode."""
_MARK = b"\x00"
"""A byte that JSON never contains: in strings it is escaped."""


class EncodedLists:
    """The long arrays of one response, or of one part of a stream."""

    def __init__(self, *, is_kept: bool = False) -> None:
        """With `is_kept`, several objects may contain an array; otherwise, only the next one."""
        self._is_kept = is_kept
        self._slices: list[list[bytes]] = []

    def encoded(self, value: object) -> list[bytes]:
        """Encode an object with its arrays, in pieces."""
        texts = encode(value).split(_MARK)
        pieces = [texts[0]]
        for number, text in zip(texts[1::2], texts[2::2], strict=True):
            pieces += self._slices[int(number)]
            pieces.append(text)
        if not self._is_kept:
            self._slices.clear()
        return pieces

    def add(self, slices: list[bytes]) -> Raw:
        """Return what stands for an array until `encoded` is called for an object with it."""
        self._slices.append(slices)
        return Raw(b"%b%d%b" % (_MARK, len(self._slices) - 1, _MARK))


class EncodedList:
    """The items of an array; all but the last few are bytes."""

    def __init__(self, lists: EncodedLists, size: int = _SLICE) -> None:
        """`size` items are encoded at a time."""
        self._lists = lists
        self._size = size
        self._slices: list[bytes] = []
        self._items: list[object] = []

    def append(self, item: object) -> None:
        self._items.append(item)
        if len(self._items) == self._size:
            self._encode()

    def _encode(self) -> None:
        content = encode(self._items)[:-1]
        self._slices.append(b"," + content[1:] if self._slices else content)
        self._items.clear()

    def json(self) -> Raw:
        """Return the JSON of the whole array, or what stands for it if it is long."""
        if not self._slices:
            return Raw(encode(self._items))
        if self._items:
            self._encode()
        self._slices.append(b"]")
        return self._lists.add(self._slices)
