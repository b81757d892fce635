"""The ground of the wire: base structs, frame header, typed encoding and decoding.

A message on any link is two ZMQ frames: a fixed header (magic, version, epoch, sequence number,
flags, checksum) and a msgpack body. Bodies are positional (`array_like`) tagged structs: append
fields at the end, with defaults, and never reorder them. docs/protocol.md describes the wire for
other languages.
"""

import functools
import struct
import sys
from array import array
from binascii import crc32
from collections.abc import Iterable
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec

PROTOCOL_VERSION = 4
"""Goes up with every change that an older peer cannot read."""

MAGIC = 0x4B54
"""The bytes `TK`, little-endian."""

_FIELDS = struct.Struct("<HHIQI")
_CHECKSUM = struct.Struct("<I")
_HEADER = struct.Struct("<HHIQII")
"""Both."""
HEADER_BYTES = _HEADER.size

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], msgspec.Meta(max_length=2**21)]
PackedTokenIds = Annotated[bytes, msgspec.Meta(max_length=4 * 2**21)]
"""Ids as unsigned 32-bit numbers, lowest byte first: nothing is spent on each of a long prompt."""


def pack_token_ids(token_ids: Iterable[int]) -> bytes:
    """Put ids together; an array of type "I" is copied as it is."""
    ids = token_ids if isinstance(token_ids, array) else array("I", token_ids)
    return _little_endian(ids).tobytes()


def unpack_token_array(packed: bytes) -> "array[int]":
    """Take ids apart, into an array of type "I".

    Raises:
        ProtocolError: there is a rest.
    """
    if len(packed) % 4:
        raise ProtocolError(f"packed token ids have {len(packed)} bytes, not a multiple of 4")
    return _little_endian(array("I", packed))


def unpack_token_ids(packed: bytes) -> list[int]:
    """Take ids apart; errors as `unpack_token_array`."""
    return unpack_token_array(packed).tolist()


_PIECE_BYTES = 2**16


@functools.cache
def _lanes(bound: int) -> tuple[int, int]:
    """Return 32-bit lanes that hold 2**31 - bound, and lanes that hold 2**31."""
    num_ids = _PIECE_BYTES // 4
    return tuple(  # type: ignore[return-value]
        int.from_bytes(lane.to_bytes(4, "little") * num_ids, "little")
        for lane in (2**31 - bound, 2**31)
    )


def has_ids_from(packed: bytes, bound: int) -> bool:
    """Whether any packed id is `bound` or more; far faster than a look at each of them.

    Each id is a lane of one long integer. Adding 2**31 - bound to all lanes sets the highest bit of
    exactly those that are too large, and one mask tests all of these bits.
    """
    addend, highest_bits = _lanes(bound)
    for start in range(0, len(packed), _PIECE_BYTES):
        ids = int.from_bytes(packed[start : start + _PIECE_BYTES], "little")
        if (ids | ids + addend) & highest_bits:
            return True
    return False


def _little_endian(ids: "array[int]") -> "array[int]":
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids


RequestId = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
MAX_TEXT = 4096
"""Characters of a `Text`; whoever sends a longer one cuts it."""
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


class Message(
    msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False, forbid_unknown_fields=True
):
    """A message that travels on its own: its class name is the tag in front of its fields."""


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """A row inside a message: positional fields without a tag."""


class ProtocolError(Exception):
    """A frame that cannot be read: wrong magic, version, shape or content."""


class DamagedFrame(ProtocolError):
    """A frame that is not as it was sent: its length or its checksum is wrong."""


class Header(NamedTuple):
    """What stands in front of every body."""

    epoch: int
    """Incarnation the sender believes in; receivers drop frames of any other."""
    seq: int
    """Counts the sender's frames on this link, from 0."""
    flags: int = 0
    """Of `protocol.frame_sequence.Flag`."""


def pack_header(epoch: int, seq: int, body: bytes, flags: int = 0) -> bytes:
    """Return the 24 header bytes that belong to `body`."""
    fields = _FIELDS.pack(MAGIC, PROTOCOL_VERSION, epoch, seq, flags)
    return fields + _CHECKSUM.pack(crc32(body, crc32(fields)))


def unpack_header(frame: bytes, body: bytes) -> Header:
    """Read a header frame, and make sure that both parts are as they were sent.

    Raises:
        DamagedFrame: wrong length or checksum.
        ProtocolError: wrong magic or protocol version.
    """
    if len(frame) != HEADER_BYTES:
        raise DamagedFrame(f"header has {len(frame)} bytes instead of {HEADER_BYTES}")
    magic, version, epoch, seq, flags, checksum = _HEADER.unpack(frame)
    if crc32(body, crc32(frame[: _FIELDS.size])) != checksum:
        raise DamagedFrame("frame does not have the checksum that its header tells")
    if magic != MAGIC:
        raise ProtocolError(f"header starts with {magic:#06x} instead of {MAGIC:#06x}")
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"peer speaks protocol version {version}, this one {PROTOCOL_VERSION}")
    return Header(epoch, seq, flags)


encode = msgspec.msgpack.Encoder().encode
"""Encode one message body."""

T = TypeVar("T")


class Decoder(Generic[T]):
    """Decodes the bodies of one direction of one link into its union of messages."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)

    def __call__(self, body: bytes) -> T:
        """Decode one body.

        Raises:
            ProtocolError: the body is no message of this direction; the text names the place.
        """
        try:
            return self._decoder.decode(body)  # type: ignore[no-any-return]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(str(error)) from error
        except (RecursionError, OverflowError, MemoryError) as error:
            raise ProtocolError(f"body cannot be decoded: {type(error).__name__}") from error
