"""The link between a supervisor and a zygote: a pair of Unix sockets, because ZMQ starts threads.

One packet is one message, of at most `MAX_PACKET_BYTES`. Descriptors travel alongside `ForkWorker`.
"""

import array
import contextlib
import os
import select
import socket
import time
from collections.abc import Sequence
from typing import Annotated, Generic, TypeVar

from msgspec import Meta

from protocol.lifecycle import Fatal, Progress, Ready
from protocol.message import Decoder, Message, ProtocolError, Text, encode

MAX_PACKET_BYTES = 64 * 1024
MAX_FDS = 4
_SEND_TIMEOUT_S = 5.0

Epoch = Annotated[int, Meta(ge=1, lt=2**32)]
FdName = Annotated[str, Meta(pattern="^[a-z]+_fd$", max_length=32)]


class ForkWorker(Message):
    """Supervisor → zygote: fork a worker. Its descriptors come with the packet, in this order."""

    epoch: Epoch
    is_standby: bool
    """Whether it waits for its promotion before it sends Hello to the core."""
    fd_names: Annotated[list[FdName], Meta(max_length=MAX_FDS)]
    """Their names on the command line of `python -m worker_proc`: "parent_fd" at least."""


class Forked(Message):
    """Zygote → supervisor: the worker runs, as an orphan, which is a child of the subreaper."""

    epoch: Epoch
    pid: Annotated[int, Meta(ge=1, lt=2**31)]


class ForkFailed(Message):
    """Zygote → supervisor: the worker could not be forked."""

    epoch: Epoch
    error: Text


ToZygote = ForkWorker
FromZygote = Progress | Ready | Fatal | Forked | ForkFailed

decode_to_zygote: Decoder[ToZygote] = Decoder(ToZygote)
decode_from_zygote: Decoder[FromZygote] = Decoder(FromZygote)

T = TypeVar("T")


class LinkClosed(Exception):
    """The other side is gone."""


class ZygoteLink(Generic[T]):
    """One end. No call waits longer than its deadline."""

    def __init__(self, end: socket.socket, decode: Decoder[T]) -> None:
        """Take one of a pair of SOCK_SEQPACKET sockets, and the decoder of the peer's messages."""
        end.setblocking(False)
        self._socket = end
        self._decode = decode

    def fileno(self) -> int:
        """Return the descriptor to poll, readable when a message has arrived."""
        return self._socket.fileno()

    def send(self, message: Message, fds: Sequence[int] = (), timeout_s: float = 0.0) -> bool:
        """Send one message; False if there is no room in time, LinkClosed if no peer is left."""
        body = encode(message)
        assert len(body) <= MAX_PACKET_BYTES
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                self._socket.sendmsg([body], rights)
                return True
            except BlockingIOError:
                poller = select.poll()
                poller.register(self._socket, select.POLLOUT)
                if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                    return False
            except ConnectionError as error:
                raise LinkClosed from error

    def deliver(self, message: Message) -> None:
        """Send a message that must arrive; LinkClosed: the other side is gone, or does not read."""
        if not self.send(message, timeout_s=_SEND_TIMEOUT_S):
            raise LinkClosed

    def receive(self) -> tuple[T, list[int]] | None:
        """Return one message and its descriptors, which the caller owns; None if there is none.

        LinkClosed: the other side is gone. ProtocolError: the packet is not a message.
        """
        try:
            body, fds, flags, _ = socket.recv_fds(
                self._socket, MAX_PACKET_BYTES, MAX_FDS, socket.MSG_CMSG_CLOEXEC
            )
        except BlockingIOError:
            return None
        except ConnectionError as error:
            raise LinkClosed from error
        if not body:
            close_all(fds)
            raise LinkClosed
        try:
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise ProtocolError("packet is too large or has too many descriptors")
            return self._decode(body), fds
        except ProtocolError:
            close_all(fds)
            raise

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Make two connected ends that preserve message boundaries."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def close_all(fds: Sequence[int]) -> None:
    """Close descriptors that are not needed."""
    for fd in fds:
        with contextlib.suppress(OSError):
            os.close(fd)
