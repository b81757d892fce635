"""A client's end of the link to the core: it connects, agrees on an epoch, and detects silence.

Messages are sent only after a `Status` with the core's epoch. Earlier ones are not kept: the user
of the link sends everything open again when a new epoch is agreed on. So there is one remedy for
every failure (a lost connection, a silent core, a queue that does not empty, a message that one end
cannot read): forget the epoch, send `Connect`, and start again with the answer.

Messages that the socket does not accept wait in the outbox. The backlog follows the outbox: its
messages are encoded only when there is room for them, for a slice of time in each turn of the loop.
"""

import asyncio
import logging
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import zmq

from protocol.api_core import Connect, ControlDone, Refused, Status, StepOutputs, decode_from_core
from protocol.config.addresses import is_remote
from protocol.kv_events import KVEventBatch, KVEventsRefused
from protocol.message import NO_EPOCH, ProtocolError, encode
from protocol.salvage import readable_outputs
from protocol.transport.channel import (
    DealerChannel,
    HighWaterMark,
    LinkEvent,
    Received,
)
from protocol.transport.curve import ClientKeys
from protocol.transport.runtime import Clock, SocketFactory

TICK_S = 1.0
STATUS_TIMEOUT_S = 5.0
"""Longest silence before the link connects again. A core reports every second, and drops slow
clients."""
RELINK_TIMEOUT_S = 2.0
"""Time without a connection after which the socket is replaced, because some errors end its own
reconnecting."""
_DRAIN_LIMIT = 64
_RETRY_S = 0.01
_SLICE_S = 0.002
"""Longest time for which sending the backlog blocks the host's event loop."""
RESYNC_PAUSE_S = 60.0
"""Shortest time between two reconnections caused by unreadable messages."""

log = logging.getLogger("troika.client")


def _no_pid() -> int:
    """Return 0 instead of a pid: a pid of another machine would mean nothing to the core."""
    return 0


def _abandon(context: SocketFactory, channel: DealerChannel) -> None:
    """Close the sockets of a link that was freed without `close`.

    A zmq.Context that is garbage together with its open sockets waits for them without end.
    """
    channel.close()
    context.term()


class UnreadableOutputs(NamedTuple):
    """Outputs of these requests have arrived but cannot be decoded."""

    request_ids: list[int]


News = StepOutputs | UnreadableOutputs | Refused | ControlDone | KVEventBatch | KVEventsRefused
"""All messages of a core except its status."""


class CoreLink:
    """One connection at a time, within the event loop in which `open` was called."""

    def __init__(
        self,
        address: str,
        outbox_limit: int,
        on_status: Callable[[Status, bool], None],
        on_message: Callable[[News], None],
        *,
        clock: Clock = time,
        make_context: Callable[[], SocketFactory] = zmq.Context,
        getpid: Callable[[], int] = os.getpid,
        keys: ClientKeys | None = None,
    ) -> None:
        """Set the core's address; nothing connects yet.

        If the socket's queue is full and more than `outbox_limit` messages wait, the link starts
        again. `on_status` receives every status, and whether it begins an epoch, in which case
        everything must be sent. `on_message` receives all other messages of the agreed epoch. The
        core watches process `getpid()`, unless its address may be on another machine; for such an
        address `keys` are needed.
        """
        self._address = address
        self._keys = keys
        self._outbox_limit = outbox_limit
        self._on_status = on_status
        self._on_message = on_message
        self._make_context = make_context
        self._monotonic = clock.monotonic
        self._getpid = _no_pid if is_remote(address) else getpid
        self._outbox: deque[bytes] = deque()
        self._backlog: Iterator[bytes] = iter(())
        self._is_flush_due = False
        self._is_look_due = False
        self._is_linked = False
        self._awaits_status = False
        # Counted in ticks: while this loop was blocked, the core was not necessarily silent.
        self._silent_s = 0.0
        self._unlinked_s = 0.0
        self._wants_resync = False
        self._since_resync_s = RESYNC_PAUSE_S
        self._unreadable = ""
        """Why the messages of the connected core cannot be read, since its last readable status."""
        self.epoch = NO_EPOCH
        self.is_open = False
        self.num_fenced_frames = 0
        """Frames dropped because their epoch is not the one agreed on."""
        self.num_bad_frames = 0
        """Bodies that could not be decoded; all readable rows of outputs are used."""

    @property
    def is_agreed(self) -> bool:
        """True if the core's epoch is known; until then messages are dropped."""
        return self.epoch != NO_EPOCH

    @property
    def problem(self) -> str:
        """The reason why no epoch is agreed on, if known."""
        return self._channel.problem or self._unreadable if self.is_open else ""

    def open(self) -> None:
        """Begin to connect, without waiting for the connection."""
        self._loop = asyncio.get_running_loop()
        self._is_look_due = False
        self._context = self._make_context()
        try:
            self._use(self._make_channel())
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
        """Send a message, or keep it until there is room; dropped if no epoch is agreed on."""
        if not self.is_agreed:
            return
        if self._outbox or not self._try_send(body):
            self._outbox.append(body)
            if len(self._outbox) > self._outbox_limit:
                self._greet()
            else:
                self._flush_soon(_RETRY_S)

    def send_backlog(self, bodies: Iterator[bytes]) -> None:
        """Send many messages, encoding each when there is room for it; `send` takes precedence.

        They replace an earlier backlog, and are dropped with the epoch.
        """
        self._backlog = bodies
        self._flush_soon(0.0)

    def tick(self) -> None:
        """Called every `TICK_S`: repeat an unanswered Connect, replace a dead socket."""
        self._silent_s += TICK_S
        self._since_resync_s += TICK_S
        is_resync_due = self._wants_resync and self._since_resync_s >= RESYNC_PAUSE_S
        if not self._is_linked:
            self._unlinked_s += TICK_S
            if self._unlinked_s >= RELINK_TIMEOUT_S:
                self._replace_channel()
        elif self._awaits_status or is_resync_due or self._silent_s >= STATUS_TIMEOUT_S:
            self._greet()

    def request_resync(self) -> None:
        """Have everything sent again at the next tick, because one of the ends lost a message.

        This happens at most once in `RESYNC_PAUSE_S`, as the message may be unreadable every time.
        """
        self._wants_resync = True

    def _replace_channel(self) -> None:
        """Replace the socket; if the system lacks resources for one, the next tick tries again."""
        try:
            channel = self._make_channel()
        except (OSError, zmq.ZMQError):
            return
        channel.problem = self._channel.problem
        self._close_channel()
        self._use(channel)

    def _make_channel(self) -> DealerChannel:
        return DealerChannel(self._context, self._address, HighWaterMark.CLIENT_LINK, self._keys)

    def _use(self, channel: DealerChannel) -> None:
        self._unlinked_s = 0.0
        self._channel = channel
        self._finalizer = weakref.finalize(self, _abandon, self._context, channel)
        self._finalizer.atexit = False  # pyzmq closes all sockets then
        self._fds = (channel.fd, int(channel.monitor.getsockopt(zmq.FD)))
        self._loop.add_reader(self._fds[0], self._on_readable)
        self._loop.add_reader(self._fds[1], self._on_link_events)
        self._loop.call_soon(self._on_link_events)

    def _close_channel(self) -> None:
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._finalizer.detach()
        self._channel.close()

    def _forget_epoch(self) -> None:
        self._clear_queues()
        self.epoch = NO_EPOCH

    def _clear_queues(self) -> None:
        self._outbox.clear()
        self._backlog = iter(())

    def _greet(self) -> None:
        """Start again: the core drops this client's requests and answers with its epoch."""
        self._forget_epoch()
        self._awaits_status = True
        if self._wants_resync:
            self._wants_resync, self._since_resync_s = False, 0.0
        self._try_send(encode(Connect(self._getpid())), begins=True)

    def _try_send(self, body: bytes, *, begins: bool = False) -> bool:
        # The descriptor is edge-triggered: a send may consume the event of an arrival.
        self._look_soon()
        return self._channel.send(self.epoch, body, begins=begins)

    def _look_soon(self) -> None:
        """Schedule one read for all sends in this turn of the loop."""
        if not self._is_look_due:
            self._is_look_due = True
            self._loop.call_soon(self._look)

    def _look(self) -> None:
        self._is_look_due = False
        self._on_readable()

    def _flush_soon(self, delay_s: float) -> None:
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_later(delay_s, self._flush)

    def _flush(self) -> None:
        """Send the outbox, then a slice of the backlog."""
        self._is_flush_due = False
        while self._outbox and self._try_send(self._outbox[0]):
            self._outbox.popleft()
        deadline = self._monotonic() + _SLICE_S
        while not self._outbox:
            if (body := next(self._backlog, None)) is None:
                return
            self.send(body)
            if self._monotonic() >= deadline:
                break
        self._flush_soon(_RETRY_S if self._outbox else 0.0)

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
                self._unreadable = ""
        self._on_readable()

    def _on_readable(self) -> None:
        if not self.is_open:
            return
        channel = self._channel
        num_read, num_bad = channel.num_read, channel.num_bad_frames
        try:
            for received in channel.drain(_DRAIN_LIMIT):
                self._on_frame(received)
            bad = channel.last_bad_frame
            if bad is not None and channel.num_bad_frames != num_bad:
                self._note_unreadable(bad.reason)
            if channel.take_loss() and self._is_linked and not self._awaits_status:
                self._greet()
        finally:
            if channel.num_read != num_read:
                self._look_soon()

    def _on_frame(self, received: Received) -> None:
        try:
            message = decode_from_core(received.body)
        except ProtocolError as error:
            self.num_bad_frames += 1
            self._note_unreadable(str(error))
            self._on_unreadable(received)
            return
        epoch = received.header.epoch
        if isinstance(message, Status):
            if epoch < self.epoch:  # left over from the previous core
                self.num_fenced_frames += 1
                return
            self._awaits_status = False
            self._silent_s = 0.0
            self._unreadable = ""
            is_new = message.facts is not None and epoch != self.epoch
            if is_new:
                self._clear_queues()
                self.epoch = epoch
            self._on_status(message, is_new)
        elif epoch != self.epoch:
            self.num_fenced_frames += 1
        else:
            self._on_message(message)

    def _note_unreadable(self, reason: str) -> None:
        """Record and log why no epoch can be agreed on, if that is the consequence."""
        problem = f"its messages cannot be read, as if it had another version: {reason}"
        if not self.is_agreed and problem != self._unreadable:
            self._unreadable = problem
            log.error("%s is not used: %s", self._address, problem)

    def _on_unreadable(self, received: Received) -> None:
        """Use the readable rows of outputs, and have only the others sent again."""
        if received.header.epoch != self.epoch:
            return
        rows = readable_outputs(received.body)
        if rows is None:
            self.request_resync()
            return
        outputs, unreadable = rows
        self._on_message(StepOutputs(outputs))
        self._on_message(UnreadableOutputs(unreadable))
