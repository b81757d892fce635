"""A client's end of the wire to the core: it connects, agrees on an epoch, and notices silence.

Nothing is sent before a `Status` has told the core's epoch, and what was not sent then is not kept:
whoever uses the link sends everything open as soon as a new epoch is agreed on. So every doubt (a
lost connection, a core that says nothing, a queue that does not empty) is resolved in one way:
forget the epoch, send `Connect`, and begin anew with the answer.
"""

import asyncio
import os
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import zmq

from protocol.api_core import (
    Connect,
    ControlDone,
    Refused,
    Status,
    StepOutputs,
    decode_from_core,
)
from protocol.channel import DealerChannel, HighWaterMark, LinkEvent, Received
from protocol.kv_events import KVEventBatch, KVEventsRefused
from protocol.message import ProtocolError, encode
from protocol.salvage import readable_outputs

TICK_S = 1.0
"""Between two calls of `CoreLink.tick`."""
STATUS_TIMEOUT_S = 5.0
"""A core reports each second. One silent for so long may have dropped this client as too slow."""
RELINK_TIMEOUT_S = 2.0
"""A socket without a connection for so long is replaced: after some errors it never reconnects."""
_DRAIN_LIMIT = 64
_RETRY_S = 0.01
DOUBT_PAUSE_S = 60.0
"""Between two new beginnings for messages that one end could not read."""
_UNKNOWN_EPOCH = 0


class UnreadableOutputs(NamedTuple):
    """Outputs have come for these requests, and cannot be decoded."""

    request_ids: list[int]


News = StepOutputs | UnreadableOutputs | Refused | ControlDone | KVEventBatch | KVEventsRefused
"""All that a core tells but its status."""


class CoreLink:
    """One connection at a time, within the event loop in which `open` was called."""

    def __init__(
        self,
        address: str,
        outbox_limit: int,
        on_status: Callable[[Status, bool], None],
        on_message: Callable[[News], None],
    ) -> None:
        """Name the core's address; nothing connects yet.

        Args:
            address: `protocol.channel.client_address`.
            outbox_limit: messages kept while the socket's queue is full; past it begin anew.
            on_status: told every status, and whether it begins an epoch, so that all is to be sent.
            on_message: told everything else that belongs to the epoch agreed on.
        """
        self._address = address
        self._outbox_limit = outbox_limit
        self._on_status = on_status
        self._on_message = on_message
        self._outbox: deque[bytes] = deque()
        self._epoch = _UNKNOWN_EPOCH
        self._is_flushing = False
        self._is_look_due = False
        self._is_linked = False
        self._awaits_status = False
        # Counted in ticks: time in which this loop itself stood still says nothing about the core.
        self._silent_s = 0.0
        self._unlinked_s = 0.0
        self._is_in_doubt = False
        self._since_doubt_s = DOUBT_PAUSE_S
        self.is_open = False
        self.num_fenced_frames = 0
        """Frames of another epoch than the one agreed on, dropped."""
        self.num_bad_frames = 0
        """Bodies that could not be decoded; of outputs all readable rows are taken."""

    @property
    def is_agreed(self) -> bool:
        """Whether the core's epoch is known, so that what is sent arrives."""
        return self._epoch != _UNKNOWN_EPOCH

    @property
    def epoch(self) -> int:
        """Of the core, as agreed on."""
        return self._epoch

    def open(self) -> None:
        """Begin to connect; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._is_look_due = False
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._use(DealerChannel(self._context, self._address, HighWaterMark.CLIENT_LINK))
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self.is_open = True

    def close(self) -> None:
        """Disconnect."""
        self.is_open = self._is_linked = False
        self._forget_epoch()
        self._close_channel()
        self._context.term()

    def send(self, body: bytes) -> None:
        """Send a message, or keep it until there is room; dropped where no epoch is agreed on."""
        if not self.is_agreed:
            return
        if not self._outbox and self._try_send(body):
            return
        self._outbox.append(body)
        if len(self._outbox) > self._outbox_limit:
            self._greet()
        elif not self._is_flushing:
            self._is_flushing = True
            self._loop.call_later(_RETRY_S, self._flush)

    def tick(self) -> None:
        """To be called every `TICK_S`: repeat what was not answered, replace what is dead."""
        self._silent_s += TICK_S
        self._since_doubt_s += TICK_S
        is_doubt_due = self._is_in_doubt and self._since_doubt_s >= DOUBT_PAUSE_S
        if not self._is_linked:
            self._unlinked_s += TICK_S
            if self._unlinked_s >= RELINK_TIMEOUT_S:
                self._replace_channel()
        elif self._awaits_status or is_doubt_due or self._silent_s >= STATUS_TIMEOUT_S:
            self._greet()

    def begin_anew_soon(self) -> None:
        """Have everything sent again with the next tick: a message was lost to one of both ends.

        Not more often than once in `DOUBT_PAUSE_S`, as the message may be unreadable for ever.
        """
        self._is_in_doubt = True

    def _replace_channel(self) -> None:
        """The old one stays where the system has no room for another; the next tick tries again."""
        try:
            channel = DealerChannel(self._context, self._address, HighWaterMark.CLIENT_LINK)
        except (OSError, zmq.ZMQError):
            return
        self._close_channel()
        self._use(channel)

    def _use(self, channel: DealerChannel) -> None:
        self._unlinked_s = 0.0
        self._channel = channel
        self._fds = (channel.fd, int(channel.monitor.getsockopt(zmq.FD)))
        self._loop.add_reader(self._fds[0], self._on_readable)
        self._loop.add_reader(self._fds[1], self._on_link_events)
        self._loop.call_soon(self._on_link_events)

    def _close_channel(self) -> None:
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._channel.close()

    def _forget_epoch(self) -> None:
        self._outbox.clear()
        self._epoch = _UNKNOWN_EPOCH

    def _greet(self) -> None:
        """Begin anew: the core drops what it has of this client, and answers with its epoch."""
        self._forget_epoch()
        self._awaits_status = True
        if self._is_in_doubt:
            self._is_in_doubt, self._since_doubt_s = False, 0.0
        self._try_send(encode(Connect(os.getpid())), begins=True)

    def _try_send(self, body: bytes, *, begins: bool = False) -> bool:
        # The descriptor is edge-triggered: trying to send may swallow the sign of an arrival.
        self._look_soon()
        return self._channel.send(self._epoch, body, begins=begins)

    def _look_soon(self) -> None:
        """Once for all that is sent in one turn of the loop."""
        if not self._is_look_due:
            self._is_look_due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_look_due = False
        self._on_readable()

    def _flush(self) -> None:
        while self._outbox and self._try_send(self._outbox[0]):
            self._outbox.popleft()
        self._is_flushing = bool(self._outbox)
        if self._outbox:
            self._loop.call_later(_RETRY_S, self._flush)

    def _on_link_events(self) -> None:
        if not self.is_open:
            return
        for event in self._channel.link_events():
            self._is_linked = event is LinkEvent.CONNECTED
            self._unlinked_s = 0.0
            if self._is_linked:
                self._greet()
            else:
                self._forget_epoch()
        self._on_readable()

    def _on_readable(self) -> None:
        if not self.is_open:
            return
        channel = self._channel
        num_read = channel.num_read
        try:
            for received in channel.drain(_DRAIN_LIMIT):
                self._on_frame(received)
            if channel.take_loss() and self._is_linked and not self._awaits_status:
                self._greet()
        finally:
            if channel.num_read != num_read:
                self._look_soon()

    def _on_frame(self, received: Received) -> None:
        try:
            message = decode_from_core(received.body)
        except ProtocolError:
            self.num_bad_frames += 1
            self._on_unreadable(received)
            return
        epoch = received.header.epoch
        if isinstance(message, Status):
            if epoch < self._epoch:  # left over from the core's predecessor
                self.num_fenced_frames += 1
                return
            self._awaits_status = False
            self._silent_s = 0.0
            is_new = message.facts is not None and epoch != self._epoch
            if is_new:
                self._outbox.clear()
                self._epoch = epoch
            self._on_status(message, is_new)
        elif epoch != self._epoch:
            self.num_fenced_frames += 1
        else:
            self._on_message(message)

    def _on_unreadable(self, received: Received) -> None:
        """Take the readable rows of outputs, and have only the others sent again."""
        if received.header.epoch != self._epoch:
            return
        rows = readable_outputs(received.body)
        if rows is None:
            self.begin_anew_soon()
            return
        outputs, unreadable = rows
        self._on_message(StepOutputs(outputs))
        self._on_message(UnreadableOutputs(unreadable))
