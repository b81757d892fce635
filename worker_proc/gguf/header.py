"""The header of one GGUF file: keys with values, and the places of its tensors.

A file begins with magic, version, number of tensors and number of keys; keys with their values and
the table of tensors follow, then, aligned, the data. All numbers are little-endian. A file is not
trusted: every length, count and offset is checked before it is used.
"""

import struct
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from worker_proc.errors import CheckpointError
from worker_proc.gguf.types import READ, Block, TensorType, type_name

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_MAX_HEADER_BYTES = 256 << 20
"""The maximum length of a header, in which a vocabulary takes a few MB."""
_FIRST_BYTES = 1 << 20
"""The length of the first piece that is read; each further piece is as long as all before it."""
_MAX_ELEMENTS = 1 << 23
"""The maximum number of elements of all lists: an element takes more memory than in the file."""
_MAX_KEYS, _MAX_TENSORS = 65_536, 1 << 17
_MAX_DIMENSIONS = 4
_ALIGNMENTS = [1 << bits for bits in range(3, 21)]
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"},
    **{10: "Q", 11: "q", 12: "d"},
}
"""Types of values, by their numbers in files, as `struct` names them."""


class TensorEntry(NamedTuple):
    """A tensor in the table of a file."""

    name: str
    type: int
    """The number of the type in files: that of a `TensorType`, or of a type that is not read."""
    shape: tuple[int, ...]
    """The last dimension varies fastest, unlike in the file."""
    offset: int
    """The offset of the data in the file."""
    file: int = 0
    """The number of the file among those of the model."""


class FileHeader(NamedTuple):
    """The header of one file."""

    path: Path
    metadata: dict[str, Any]
    """Values by their keys: integers, floats, booleans, strings, or lists of these."""
    tensors: list[TensorEntry]
    num_bytes: int
    """The length of the header, which the data follow."""
    file_bytes: int


def read_file_header(path: Path, file_bytes: int, read: Callable[[int], bytes]) -> FileHeader:
    """Read the header of a file; raises CheckpointError with what is wrong with it.

    `read` returns the next bytes of the file, as many as it is asked for while the file has them.
    """
    return _Reader(path, file_bytes, read).header()


def check_place(path: Path, size: int, entry: TensorEntry, block: Block) -> int:
    """Return the offset at which a tensor of blocks ends.

    Raises CheckpointError if it is not within a file of `size` bytes.
    """
    name, shape = entry.name[:100], list(entry.shape)
    if 0 in shape or shape[-1] % block.num_values:
        raise CheckpointError(
            f"{path}: {name} has the shape {shape}, and rows of {type_name(entry.type)} have"
            f" multiples of {block.num_values} values"
        )
    end = entry.offset + prod(shape) // block.num_values * block.num_bytes
    if end > size:
        raise CheckpointError(
            f"{path}: it has {size} bytes, and {name} ends at byte {end}: it is truncated"
        )
    return end


class _Reader:
    """Reads values one after another, within the bounds of the file."""

    def __init__(self, path: Path, file_bytes: int, read: Callable[[int], bytes]) -> None:
        self._path, self._size, self._read = path, file_bytes, read
        self._data = bytearray(read(min(_FIRST_BYTES, file_bytes)))
        self._at = 0
        self._num_elements = 0

    def header(self) -> FileHeader:
        if self._data[:4] != MAGIC:
            raise self._error("it does not begin with GGUF")
        self._at = 4
        (version,) = self._unpack("I", "the version")
        if version not in _VERSIONS:
            is_swapped = int.from_bytes(version.to_bytes(4, "big"), "little") in _VERSIONS
            kind = "big-endian" if is_swapped else f"of version {version}"
            raise self._error(f"it is {kind}; little-endian files of versions 2 and 3 are read")
        num_tensors, num_keys = self._unpack("QQ", "the number of tensors")
        self._bound("tensors", num_tensors, _MAX_TENSORS)
        self._bound("keys", num_keys, _MAX_KEYS)
        metadata = dict(self._pairs(num_keys))
        table = [self._entry() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment not in _ALIGNMENTS:
            known = f"a power of two from {_ALIGNMENTS[0]} to {_ALIGNMENTS[-1]}"
            raise self._error(f"general.alignment is {alignment!r}, and must be {known}")
        start = -(-self._at // alignment) * alignment
        tensors = [entry._replace(offset=start + entry.offset) for entry in table]
        for entry in tensors:
            if entry.offset % alignment:
                raise self._error(
                    f"{entry.name[:100]} begins at byte {entry.offset}, which is not a multiple of"
                    f" general.alignment, {alignment}"
                )
            if entry.type in READ:
                check_place(self._path, self._size, entry, TensorType(entry.type).block)
        return FileHeader(self._path, metadata, tensors, start, self._size)

    def _pairs(self, num_keys: int) -> Iterator[tuple[str, Any]]:
        seen: set[str] = set()
        for _ in range(num_keys):
            key = self._string("a key")
            if key in seen:
                raise self._error(f"it has the key {key[:100]!r} twice")
            seen.add(key)
            (kind,) = self._unpack("I", key)
            yield key, self._value(kind, key)

    def _value(self, kind: int, key: str) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            inner, count = self._unpack("IQ", key)
            self._num_elements += count
            self._bound(f"elements of lists up to {key[:100]}", self._num_elements, _MAX_ELEMENTS)
            if inner == _STRING:
                self._fits(8 * count, key)
                return [self._string(key) for _ in range(count)]
            code = self._scalar(inner, key)
            self._fits(struct.calcsize(f"<{code}") * count, key)
            return list(self._unpack(f"{count}{code}", key))
        return self._unpack(self._scalar(kind, key), key)[0]

    def _scalar(self, kind: int, key: str) -> str:
        if kind not in _SCALARS:
            raise self._error(f"{key[:100]} has values of type {kind}, which is not known")
        return _SCALARS[kind]

    def _entry(self) -> TensorEntry:
        name = self._string("the name of a tensor")
        (num_dimensions,) = self._unpack("I", name)
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise self._error(
                f"{name[:100]} has {num_dimensions} dimensions, and 1 to {_MAX_DIMENSIONS} are read"
            )
        shape = self._unpack(f"{num_dimensions}Q", name)
        kind, offset = self._unpack("IQ", name)
        return TensorEntry(name, kind, tuple(reversed(shape)), offset)

    def _string(self, what: str) -> str:
        (length,) = self._unpack("Q", what)
        self._fits(length, what)
        raw = self._data[self._at : self._at + length]
        self._at += length
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self._error(f"{what[:100]} is not UTF-8") from error

    def _unpack(self, codes: str, what: str) -> tuple[Any, ...]:
        size = struct.calcsize(f"<{codes}")
        self._fits(size, what)
        self._at += size
        return struct.unpack_from(f"<{codes}", self._data, self._at - size)

    def _fits(self, size: int, what: str) -> None:
        end = self._at + size
        if len(self._data) < end <= min(self._size, _MAX_HEADER_BYTES):
            wanted = max(end - len(self._data), len(self._data))
            self._data += self._read(min(wanted, self._size - len(self._data)))
        if end <= len(self._data):
            return
        what = what[:100]
        if end > self._size or end <= _MAX_HEADER_BYTES:
            raise self._error(f"it ends within its header, at {what}: it is truncated")
        raise self._error(f"its header has more than {_MAX_HEADER_BYTES} bytes, at {what}")

    def _bound(self, what: str, count: int, max_count: int) -> None:
        if count > max_count:
            raise self._error(f"it states {count} {what}, and at most {max_count} are read")

    def _error(self, text: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {text}")
