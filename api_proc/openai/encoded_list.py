"""A long JSON array that is encoded in slices while it is built.

The encoder lets no other thread run until it ends, and an answer with log-probabilities has many
megabytes. So its parts are encoded a few at a time, and only bytes are kept of them.
"""

from msgspec import Raw

from api_proc.http.connection import encode

_SLICE = 64
"""Tokens with 20 candidates each that take about half a millisecond to encode."""


class EncodedList:
    """The items of an array; all but the last few are bytes."""

    def __init__(self) -> None:
        self._slices: list[bytes] = []
        self._items: list[object] = []

    def append(self, item: object) -> None:
        self._items.append(item)
        if len(self._items) == _SLICE:
            self._encode()

    def _encode(self) -> None:
        content = encode(self._items)[:-1]
        self._slices.append(b"," + content[1:] if self._slices else content)
        self._items.clear()

    def json(self) -> Raw:
        """Return the JSON of the whole array."""
        if self._items or not self._slices:
            self._encode()
        return Raw(b"".join([*self._slices, b"]"]))
