"""The base of the wire: structs, frame header, typed encoding and decoding, token ids.

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

PROTOCOL_VERSION = 16
"""Incremented with every change that an older peer cannot read."""

MAGIC = 0x4B54
"""The bytes `TK`, little-endian."""
NO_EPOCH = 0
"""The epoch in frames whose sender has not agreed on one."""

_FIELDS = struct.Struct("<HHIQI")
_CHECKSUM = struct.Struct("<I")
_HEADER = struct.Struct("<HHIQII")
HEADER_BYTES = _HEADER.size
_PIECE_BYTES = 2**16
"""Bytes of packed ids that are compared at once."""

# Messages ---------------------------------------------------------------------------------------


class Message(
    msgspec.Struct, array_like=True, tag=True, frozen=True, gc=False, forbid_unknown_fields=True
):
    """A message: the class name is the tag in front of its fields."""


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False, forbid_unknown_fields=True):
    """A row inside a message: positional fields without a tag."""


# Frames -----------------------------------------------------------------------------------------


class ProtocolError(Exception):
    """A frame that cannot be read: wrong magic, version, shape or content."""


class OtherVersion(ProtocolError):
    """A frame of a program with another version of the protocol."""


class DamagedFrame(ProtocolError):
    """A frame was damaged on the way: its length or its checksum is wrong."""


class Header(NamedTuple):
    """The header of a frame."""

    epoch: int
    """Incarnation that the sender has agreed on; receivers drop frames of any other."""
    seq: int
    """Number of the frame among the sender's on this link, from 0."""
    flags: int = 0
    """A combination of `protocol.transport.frame_sequence.Flag`."""


def pack_header(epoch: int, seq: int, body: bytes, flags: int = 0) -> bytes:
    """Return the header bytes that belong to `body`."""
    fields = _FIELDS.pack(MAGIC, PROTOCOL_VERSION, epoch, seq, flags)
    return fields + _CHECKSUM.pack(crc32(body, crc32(fields)))


def unpack_header(frame: bytes, body: bytes) -> Header:
    """Decode a header frame and verify the checksum of both parts, or raise ProtocolError."""
    if len(frame) != HEADER_BYTES:
        raise DamagedFrame(f"header has {len(frame)} bytes instead of {HEADER_BYTES}")
    magic, version, epoch, seq, flags, checksum = _HEADER.unpack(frame)
    if crc32(body, crc32(frame[: _FIELDS.size])) != checksum:
        raise DamagedFrame("frame does not have the checksum of its header")
    if magic != MAGIC:
        raise ProtocolError(f"header starts with {magic:#06x} instead of {MAGIC:#06x}")
    if version != PROTOCOL_VERSION:
        raise OtherVersion(f"peer has protocol {version}, this program {PROTOCOL_VERSION}")
    return Header(epoch, seq, flags)


# Bodies -----------------------------------------------------------------------------------------

encode = msgspec.msgpack.Encoder().encode

T = TypeVar("T")


class Decoder(Generic[T]):
    """Decodes the messages of one direction of one link."""

    def __init__(self, union: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(union)

    def __call__(self, body: bytes) -> T:
        """Decode one body; ProtocolError names the place at which it is not a message."""
        try:
            return self._decoder.decode(body)  # type: ignore[no-any-return]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ProtocolError(str(error)) from error
        except (RecursionError, OverflowError, MemoryError) as error:
            raise ProtocolError(f"body cannot be decoded: {type(error).__name__}") from error


# Types of fields --------------------------------------------------------------------------------

MAX_REQUEST_ID = 2**53
"""Ids of requests are less: all languages can read them."""
RequestId = Annotated[int, msgspec.Meta(ge=0, lt=MAX_REQUEST_ID)]
MAX_TEXT = 4096
"""Characters of a `Text`; senders cut longer ones."""
Text = Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
Tenant = Annotated[str, msgspec.Meta(max_length=256)]
Origin = Annotated[str, msgspec.Meta(max_length=64)]

# Token ids --------------------------------------------------------------------------------------

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
MAX_TOKEN_IDS = 2**21
TokenIds = Annotated[list[TokenId], msgspec.Meta(max_length=MAX_TOKEN_IDS)]
PackedTokenIds = Annotated[bytes, msgspec.Meta(max_length=4 * MAX_TOKEN_IDS)]
"""Ids as unsigned 32-bit little-endian numbers: encoding a long prompt is one copy."""


def pack_token_ids(token_ids: Iterable[int]) -> bytes:
    """Pack ids; an array of type "I" is copied as it is."""
    ids = token_ids if isinstance(token_ids, array) else array("I", token_ids)
    return _little_endian(ids).tobytes()


def unpack_token_array(packed: bytes) -> "array[int]":
    """Unpack ids into an array of type "I"; ProtocolError unless they have 4 bytes each."""
    if len(packed) % 4:
        raise ProtocolError(f"packed token ids have {len(packed)} bytes, not a multiple of 4")
    return _little_endian(array("I", packed))


def unpack_token_ids(packed: bytes) -> list[int]:
    """Unpack ids into a list; errors as `unpack_token_array`."""
    return unpack_token_array(packed).tolist()


def unpack_floats(packed: bytes) -> "array[float]":
    """Unpack numbers of 32 bits, little-endian, into an array of type "f"."""
    numbers = array("f", packed)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


@functools.cache
def _lanes(value: int) -> int:
    """Return the number whose 32-bit lanes all hold `value`."""
    return int.from_bytes(value.to_bytes(4, "little") * (_PIECE_BYTES // 4), "little")


def has_ids_from(packed: bytes, bound: int) -> bool:
    """Return whether any packed id is `bound` or more; faster than comparing ids one by one.

    Each id is a 32-bit lane of one long integer. Adding 2**31 - bound to all lanes sets the highest
    bit of exactly those lanes that are too large, and one mask tests all of these bits.
    """
    addend, highest_bits = _lanes(2**31 - bound), _lanes(2**31)
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
