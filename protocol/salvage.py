"""Reads parts of a message that cannot be decoded, so that only one request is lost with it.

An array of msgpack begins with its length, and a message with its name and, for requests and rows
of outputs, the number of the request. These bytes can be read even if those after them cannot.
"""

import msgspec

from protocol.api_core import RequestOutput
from protocol.message import MAX_REQUEST_ID, encode

_ADD = encode("AddRequest")
_STEP_OUTPUTS = encode("StepOutputs")
_UINT_BYTES = {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}
"""Number of value bytes after the first byte of an unsigned msgpack integer."""
_decode_parts = msgspec.msgpack.Decoder(list[msgspec.Raw]).decode
_decode_row = msgspec.msgpack.Decoder(RequestOutput).decode


def request_id_of_add(body: bytes) -> int | None:
    """Return the request id of an unreadable `AddRequest`; None: it is another message."""
    start = _after_array_head(body)
    if not body.startswith(_ADD, start):
        return None
    return _read_uint(body, start + len(_ADD))


def readable_outputs(body: bytes) -> tuple[list[RequestOutput], list[int]] | None:
    """Return the rows of an unreadable `StepOutputs`, and the request ids of the unreadable ones.

    None: it is another message, or a row does not even show its request.
    """
    if not body.startswith(_STEP_OUTPUTS, _after_array_head(body)):
        return None
    try:
        rows = _decode_parts(_decode_parts(body)[1])
    except (msgspec.DecodeError, MemoryError, RecursionError, IndexError):
        return None
    outputs, unreadable = [], []
    for row in map(bytes, rows):
        try:
            outputs.append(_decode_row(row))
        except (msgspec.DecodeError, UnicodeDecodeError, MemoryError, OverflowError):
            request_id = _read_uint(row, _after_array_head(row))
            if request_id is None:
                return None
            unreadable.append(request_id)
    return outputs, unreadable


def _after_array_head(body: bytes) -> int:
    return {0xDC: 3, 0xDD: 5}.get(body[0] if body else 0, 1)


def _read_uint(body: bytes, start: int) -> int | None:
    first = body[start] if start < len(body) else 0xFF
    if first < 0x80:
        return first
    size = _UINT_BYTES.get(first)
    if size is None or start + 1 + size > len(body):
        return None
    number = int.from_bytes(body[start + 1 : start + 1 + size], "big")
    return number if number < MAX_REQUEST_ID else None
