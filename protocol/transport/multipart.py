"""Reads and writes ZMQ messages of several parts without waiting. One thread at a time per socket.

pyzmq's own functions cost several times as much: they combine flags as enums for each part, and
raise an exception for each read of an empty socket.
"""

from collections.abc import Sequence

import zmq

MAX_PARTS = 4
"""Identity, header, body, and one more, which marks an invalid message."""
_READABLE = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)
_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """Read one message, None if there is none; parts after the first `MAX_PARTS` are dropped."""
    if not int(socket.getsockopt(zmq.EVENTS)) & _READABLE:
        return None
    try:
        part = socket.recv(_NOBLOCK, copy=False)
    except zmq.Again:  # its connection has broken meanwhile
        return None
    parts = [part.bytes]
    num_parts = 1
    while part.more:
        part = socket.recv(_NOBLOCK, copy=False)
        num_parts += 1
        if num_parts <= MAX_PARTS:
            try:
                parts.append(part.bytes)
            except MemoryError:  # without its content it fails its checksum, and is sent again
                parts.append(b"")
    return parts


def send(socket: zmq.Socket[bytes], parts: Sequence[bytes]) -> None:
    """Write the parts of one message. zmq.Again: there is no room. EHOSTUNREACH: no such peer."""
    for part in parts[:-1]:
        socket.send(part, _AND_MORE)
    socket.send(parts[-1], _NOBLOCK)
