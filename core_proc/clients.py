"""The core's end of the client link: requests to the engine, answers to whoever asked.

Nothing that a client sends, or fails to read, harms anybody else: a message that cannot be obeyed
is answered, and a client that falls too far behind is dropped with its requests.
"""

import logging
from collections import deque
from collections.abc import Iterable, Iterator

from core_proc.engine import EngineCore
from core_proc.event_log import EventLog
from core_proc.watch import DeathWatch
from protocol.api_core import (
    AbortRequests,
    AddRequest,
    ClientToCore,
    Connect,
    Control,
    ControlDone,
    CoreToClient,
    ErrorCode,
    KVEventsTaken,
    Refused,
    RequestError,
    Status,
    StepOutputs,
    decode_from_client,
)
from protocol.channel import MAX_FRAME_BYTES, PeerGone, Received, RouterChannel
from protocol.kv_events import KVEventsRefused, SubscribeKVEvents, UnsubscribeKVEvents
from protocol.message import MAX_TEXT, ProtocolError, encode

DRAIN_LIMIT = 64
OUTBOX_LIMIT = 8192
"""Messages kept for a client that does not read; past it the client counts as gone."""
OUTBOX_BYTES = 64 * 2**20
"""The same in bytes; a message alone may be as large as a frame."""

log = logging.getLogger("troika.core")


class Outbox:
    """What one client has not taken yet."""

    __slots__ = ("bodies", "num_bytes")

    def __init__(self) -> None:
        self.bodies: deque[bytes] = deque()
        self.num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self.bodies)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.bodies)

    @property
    def excess(self) -> str | None:
        """What is too much, if the client is too far behind."""
        if len(self.bodies) > OUTBOX_LIMIT:
            return f"{OUTBOX_LIMIT} messages"
        return f"{OUTBOX_BYTES} bytes" if self.num_bytes > OUTBOX_BYTES else None

    def append(self, body: bytes) -> None:
        """Keep one more."""
        self.bodies.append(body)
        self.num_bytes += len(body)

    def popleft(self) -> None:
        """The first was taken."""
        self.num_bytes -= len(self.bodies.popleft())


class Clients:
    """Whoever has said Connect, with what is still to be sent to each."""

    def __init__(
        self, link: RouterChannel, watch: DeathWatch, engine: EngineCore, epoch: int
    ) -> None:
        self._link = link
        self._watch = watch
        self._engine = engine
        self._epoch = epoch
        self._outboxes: dict[bytes, Outbox] = {}
        self._events = EventLog(epoch, engine.snapshot_kv_events)
        self._num_bad_frames_told = 0

    @property
    def is_behind(self) -> bool:
        """Whether any client has not taken all that it was told, or is yet to be told more."""
        return any(self._outboxes.values()) or bool(self._events.waiting())

    def drain(self) -> None:
        """Obey what has arrived, a bounded part of it, and send what could not be sent before."""
        for received in self._link.drain(DRAIN_LIMIT):
            self._on_frame(received)
        for peer in [peer for peer, outbox in self._outboxes.items() if outbox]:
            self._flush(peer)

    def _on_frame(self, received: Received) -> None:
        peer, header, body = received
        try:
            message = decode_from_client(body)
        except ProtocolError as problem:
            self._link.count_bad_frame(peer, str(problem))
            error = RequestError(ErrorCode.INVALID, str(problem)[:MAX_TEXT])
            self.tell(peer, Refused(None, error, header.seq))
            return
        try:
            self._obey(peer, header.epoch, message)
        except Exception:
            log.exception("%s of a client failed", type(message).__name__)
            self._answer_failed(peer, message)

    def _answer_failed(self, peer: bytes, message: ClientToCore) -> None:
        """An error of ours leaves nobody waiting for an answer."""
        if isinstance(message, AddRequest):
            self._give_up(peer, message.request_id, "the request could not be taken in")
        elif isinstance(message, Control):
            self.tell(peer, ControlDone(message.number, False, self._engine.pause_mode))
        elif isinstance(message, SubscribeKVEvents):
            self._events.unsubscribe(peer)
            self.tell(peer, KVEventsRefused(message.subscription, "the subscription failed"))

    def _obey(self, peer: bytes, epoch: int, message: ClientToCore) -> None:
        if isinstance(message, Connect):
            self._on_connect(peer, message)
        elif epoch != self._epoch or peer not in self._outboxes:
            self._engine.num_fenced_frames += 1
        elif isinstance(message, AddRequest):
            refused = self._engine.add(peer, message)
            if refused is not None:
                self.tell(peer, refused)
        elif isinstance(message, AbortRequests):
            self._engine.abort(peer, message.request_ids)
        elif isinstance(message, Control):
            self._engine.control(peer, message)
        elif isinstance(message, SubscribeKVEvents):
            self._subscribe(peer, message)
        elif isinstance(message, UnsubscribeKVEvents):
            self._events.unsubscribe(peer)
        elif isinstance(message, KVEventsTaken):
            self._events.taken(peer)

    def _subscribe(self, peer: bytes, message: SubscribeKVEvents) -> None:
        if self._engine.has_kv_events:
            self._events.subscribe(peer, message)
        else:
            reason = "the engine was started without enable_kv_events"
            self.tell(peer, KVEventsRefused(message.subscription, reason))

    def _on_connect(self, peer: bytes, message: Connect) -> None:
        """A peer that was known has lost something on the way, and will send all of it again."""
        num_aborted = self._engine.drop_client(peer)
        if num_aborted:
            log.info("client begins anew: %d requests aborted", num_aborted)
        self._events.forget(peer)
        self._outboxes[peer] = Outbox()
        self._watch.add(peer, message.pid)
        self.tell(peer, self._engine.status())

    def dead(self, ready: Iterable[object]) -> list[bytes]:
        """Clients whose process has died, according to a poll."""
        return self._watch.dead(ready)

    def lose(self, peer: bytes, why: str) -> None:
        """Forget a client, if it is known, and all that it has asked for."""
        if self._outboxes.pop(peer, None) is None:
            return
        self._watch.remove(peer)
        self._link.forget(peer)
        self._events.forget(peer)
        num_aborted = self._engine.drop_client(peer)
        log.info("client %s: %d requests aborted", why, num_aborted)

    def tell_news(self) -> None:
        """Tell what this turn has brought beside outputs, and events to whoever keeps up."""
        for peer, message in self._engine.take_mail():
            self.tell(peer, message)
        self._events.append(self._engine.take_kv_events())
        for peer in self._events.waiting():
            if not self._outboxes[peer]:
                self._tell_events(peer)

    def _tell_events(self, peer: bytes) -> None:
        try:
            batch = self._events.take_batch(peer)
        except Exception:
            log.exception("events for a client failed")
            self.tell(peer, self._events.refuse(peer, "the events could not be told"))
        else:
            self.tell(peer, batch)

    def tell(self, peer: bytes, message: CoreToClient) -> None:
        """Send a message now or as soon as there is room; to a client that is gone, never."""
        outbox = self._outboxes.get(peer)
        if outbox is None:
            return
        body = encode(message)
        if len(body) > MAX_FRAME_BYTES:
            self._tell_in_parts(peer, message)
            return
        outbox.append(body)
        self._flush(peer)

    def _tell_in_parts(self, peer: bytes, message: CoreToClient) -> None:
        assert isinstance(message, StepOutputs), "nothing else grows with what was asked for"
        rows = message.outputs
        if len(rows) == 1:
            self._give_up(peer, rows[0].request_id, "the output exceeds a frame of the wire")
            return
        half = len(rows) // 2
        self.tell(peer, StepOutputs(rows[:half]))
        self.tell(peer, StepOutputs(rows[half:]))

    def _give_up(self, peer: bytes, request_id: int, why: str) -> None:
        self._engine.abort(peer, [request_id])
        self.tell(peer, Refused(request_id, RequestError(ErrorCode.INTERNAL, why)))

    def _flush(self, peer: bytes) -> None:
        outbox = self._outboxes[peer]
        try:
            while outbox and self._link.send(peer, self._epoch, outbox.bodies[0]):
                outbox.popleft()
        except PeerGone:
            self.lose(peer, "has disconnected")
            return
        excess = outbox.excess
        if excess is not None:
            self.lose(peer, f"has left {excess} unread")

    def report(self, status: Status) -> None:
        """Tell everybody how the engine is, and the log what could not be read since last time."""
        for peer in list(self._outboxes):
            self.tell(peer, status)
        num_bad = self._link.num_bad_frames - self._num_bad_frames_told
        bad = self._link.last_bad_frame
        if num_bad and bad is not None:
            self._num_bad_frames_told += num_bad
            log.warning("clients sent %d unreadable messages, the last: %s", num_bad, bad.reason)
