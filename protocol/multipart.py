"""ZMQ messages of several parts, read and written without waiting. One thread at a time per socket.

What pyzmq offers for this costs several times as much: it combines flags as enums for each part,
and raises an exception for each look at a socket on which nothing has arrived.
"""

from collections.abc import Sequence

import zmq

MAX_PARTS = 4
"""Identity, header, body, and one that is too many."""
_READABLE = int(zmq.POLLIN)
_NOBLOCK = int(zmq.NOBLOCK)
_AND_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


def receive(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    """Read the parts of one message; None if there is none.

    However many there are, no more than `MAX_PARTS` are kept.
    """
    if not int(socket.getsockopt(zmq.EVENTS)) & _READABLE:
        return None
    try:
        part = socket.recv(_NOBLOCK, copy=False)
    except zmq.Again:  # its connection has broken since
        return None
    parts = [part.bytes]
    num_parts = 1
    while part.more:
        part = socket.recv(_NOBLOCK, copy=False)
        num_parts += 1
        if num_parts <= MAX_PARTS:
            parts.append(_copy(part))
    return parts


def _copy(part: zmq.Frame) -> bytes:
    """Copy a part; one that memory does not suffice for fails its checksum, and is sent again."""
    try:
        return part.bytes
    except MemoryError:
        return b""


def send(socket: zmq.Socket[bytes], parts: Sequence[bytes]) -> None:
    """Write the parts of one message.

    Raises:
        zmq.Again: there is no room; nothing was sent.
        zmq.ZMQError: errno EHOSTUNREACH: the first part names nobody who is connected.
    """
    for part in parts[:-1]:
        socket.send(part, _AND_MORE)
    socket.send(parts[-1], _NOBLOCK)
