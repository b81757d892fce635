"""Queries a supervisor for the state of its processes, for the status command and for embedding."""

import threading
import time
from typing import TypeVar

import zmq

from protocol.lifecycle import (
    FromSupervisor,
    RestartQuery,
    RestartReply,
    Role,
    StatusQuery,
    StatusReply,
    decode_from_supervisor,
)
from protocol.message import NO_EPOCH, Message, ProtocolError, encode
from protocol.process.run_dir import lifecycle_address
from protocol.transport.channel import DealerChannel, HighWaterMark

_DRAIN_LIMIT = 16
_SLICE_S = 0.05
"""Longest wait before `close` is noticed."""

T = TypeVar("T", StatusReply, RestartReply)


class StatusLink:
    """A connection to the supervisor of one run directory.

    Any thread may query, one after the other, and any may close it meanwhile: two threads that use
    a socket at once would crash the program.
    """

    def __init__(self, run_dir: str) -> None:
        """Start connecting; the supervisor may come later."""
        self._lock = threading.Lock()
        self._is_closing = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel = DealerChannel(
            self._context, lifecycle_address(run_dir), HighWaterMark.LIFECYCLE_LINK
        )

    def query(self, timeout_s: float, watch_fd: int | None = None) -> StatusReply | None:
        """Send one query; None: no reply in time, the link is closed, or `watch_fd` is readable."""
        return self._ask(StatusQuery(), StatusReply, timeout_s, watch_fd)

    @property
    def unreadable(self) -> str:
        """What is wrong with the last message that could not be read; empty: all could."""
        if self._channel.last_bad_frame is not None:
            return self._channel.last_bad_frame.reason
        return "a damaged message" if self._channel.num_dropped_frames else ""

    def restart(
        self, role: Role, timeout_s: float, index: int | None = None
    ) -> RestartReply | None:
        """Request a planned restart, with an `index` of one API process only.

        None if no reply came in time.
        """
        return self._ask(RestartQuery(role, index), RestartReply, timeout_s, None)

    def close(self) -> None:
        """Disconnect; queries under way return None. Idempotent."""
        self._is_closing = True
        self._end()

    def _end(self) -> None:
        """Close the socket; if a query uses it, even one below a signal handler, the query does."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if not self._channel.socket.closed:
                self._channel.close()
                self._context.term()
        finally:
            self._lock.release()

    def _ask(
        self, question: Message, kind: type[T], timeout_s: float, watch_fd: int | None
    ) -> T | None:
        deadline = time.monotonic() + timeout_s
        if not self._lock.acquire(timeout=max(0.0, timeout_s)):
            return None
        try:
            if self._is_closing:
                return None
            self._channel.link_events()
            self._latest_reply(kind)  # drops late replies to earlier queries
            can_send = self._wait(zmq.POLLOUT, deadline, watch_fd)
            if can_send and self._channel.send(NO_EPOCH, encode(question)):
                while self._wait(zmq.POLLIN, deadline, watch_fd):
                    if (reply := self._latest_reply(kind)) is not None:
                        return reply
            return None
        finally:
            self._lock.release()
            if self._is_closing:
                self._end()

    def _wait(self, flag: int, deadline: float, watch_fd: int | None) -> bool:
        poller = zmq.Poller()
        poller.register(self._channel.socket, flag)
        if watch_fd is not None:
            poller.register(watch_fd, zmq.POLLIN)
        while not self._is_closing:
            remaining_s = max(0.0, deadline - time.monotonic())
            ready = dict(poller.poll(round(min(remaining_s, _SLICE_S) * 1000)))
            if ready or remaining_s == 0.0:
                return self._channel.socket in ready
        return False

    def _latest_reply(self, kind: type[T]) -> T | None:
        reply = None
        for received in self._channel.drain(_DRAIN_LIMIT):
            try:
                message: FromSupervisor = decode_from_supervisor(received.body)
            except ProtocolError as error:
                self._channel.count_bad_frame(received.peer, str(error))
                continue
            if isinstance(message, kind):
                reply = message
        return reply
