"""The file of a KV block: a header with a checksum over name and content, then the content."""

import os
import struct
import zlib
from collections import deque

from worker_proc.offload.memory import Parts

_HEADER = struct.Struct("<4sIQ")
HEADER_BYTES = _HEADER.size
_PAGE_BYTES = 4096
"""A file occupies whole pages, of memory or of a disk."""
_MAGIC = b"TKV1"
_MAX_PARTS = 512
"""Maximum number of buffers written or read at once; the system's limit is 1,024."""


def taken_bytes(block_bytes: int) -> int:
    """Return the bytes that the file of a block occupies."""
    num_pages = -(-(_HEADER.size + block_bytes) // _PAGE_BYTES)
    return num_pages * _PAGE_BYTES


def file_bytes(block: Parts) -> int:
    """Return the length of the file of a block."""
    return HEADER_BYTES + sum(map(len, block))


def file_header(key: bytes, block: Parts) -> bytes:
    """Return the first `HEADER_BYTES` bytes of the file of a block."""
    return _HEADER.pack(_MAGIC, _checksum(key, block), sum(map(len, block)))


def write_file(fd: int, key: bytes, block: Parts) -> None:
    """Write the file of a block to a new file; raises OSError."""
    _write_all(fd, [memoryview(file_header(key, block)), *block])


def read_file(fd: int, key: bytes, block: Parts) -> bool:
    """Fill a block from its file; return False, with `block` undefined, if the file is damaged.

    Raises OSError if it cannot be read.
    """
    header = bytearray(HEADER_BYTES)
    is_whole = _read_all(fd, [memoryview(header), *block])
    return is_whole and _is_intact(header, key, block)


class Unpacking:
    """Fills a block from the pieces of its file, in order."""

    def __init__(self, key: bytes, block: Parts) -> None:
        self._key = key
        self._block = block
        self._header = bytearray(HEADER_BYTES)
        self.num_bytes = file_bytes(block)
        """Length of the whole file."""
        self._left = deque([memoryview(self._header), *block])
        """The parts that are not filled yet."""

    def add(self, piece: memoryview) -> None:
        """Add the next piece; raise ValueError, writing nothing, if it extends beyond the end."""
        if len(piece) > sum(map(len, self._left)):
            raise ValueError(f"the file of a block has only {self.num_bytes} bytes")
        while piece:
            target = self._left.popleft()
            num_bytes = min(len(target), len(piece))
            target[:num_bytes] = piece[:num_bytes]
            if num_bytes < len(target):
                self._left.appendleft(target[num_bytes:])
            piece = piece[num_bytes:]

    @property
    def is_intact(self) -> bool:
        """True if the whole block has arrived intact; otherwise its content is undefined."""
        if any(map(len, self._left)):
            return False
        return _is_intact(self._header, self._key, self._block)


def _is_intact(header: bytes | bytearray, key: bytes, block: Parts) -> bool:
    magic, checksum, num_bytes = _HEADER.unpack(header)
    is_whole: bool = magic == _MAGIC and num_bytes == sum(map(len, block))
    return is_whole and checksum == _checksum(key, block)


def _checksum(key: bytes, block: Parts) -> int:
    checksum = zlib.crc32(key)
    for part in block:
        checksum = zlib.crc32(part, checksum)
    return checksum


def _write_all(fd: int, parts: list[memoryview]) -> None:
    for first in range(0, len(parts), _MAX_PARTS):
        some = parts[first : first + _MAX_PARTS]
        left = sum(map(len, some)) - os.writev(fd, some)
        if left:  # the file system is full, or a signal interrupted
            rest = memoryview(b"".join(some))[-left:]
            while rest:
                rest = rest[os.write(fd, rest) :]


def _read_all(fd: int, parts: list[memoryview]) -> bool:
    """Fill all parts; return False if the file is shorter."""
    for first in range(0, len(parts), _MAX_PARTS):
        some = parts[first : first + _MAX_PARTS]
        if os.readv(fd, some) != sum(map(len, some)):
            return False  # a file system returns less only at the end of a file
    return True
