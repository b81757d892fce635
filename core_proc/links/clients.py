"""The core's end of the client link: requests to the engine, outputs and answers to clients.

Nothing that a client sends, or does not read, affects another client. A message that cannot be
decoded or handled is answered, and fails nothing but the request that it is about. A client that
falls too far behind is dropped with its requests.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from core_proc.engine import EngineCore
from core_proc.links.event_log import EventLog
from core_proc.links.pidfd_monitor import PidfdMonitor
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
from protocol.config.request_errors import request_error
from protocol.kv_events import KVEventsRefused, SubscribeKVEvents, UnsubscribeKVEvents
from protocol.message import MAX_TEXT, ProtocolError, encode
from protocol.salvage import request_id_of_add
from protocol.transport.channel import MAX_FRAME_BYTES, PeerGone, Received, RouterChannel

DRAIN_LIMIT = 64
"""Frames handled in one turn of the loop."""
DRAIN_BYTES = 2**18
"""A turn ends with the frame that reaches this many bytes, ..."""
DRAIN_S = 0.002
"""... or this time, so that no step is delayed by more than a few milliseconds."""
OUTBOX_LIMIT = 8192
"""Messages kept for a client that does not read; past it the client counts as gone."""
OUTBOX_BYTES = 64 * 2**20
"""Bytes kept for such a client; a single message may be as large as a frame."""

log = logging.getLogger("troika.core")


@dataclass(slots=True)
class Outbox:
    """The messages that one client has not taken yet."""

    bodies: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0

    @property
    def excess(self) -> str | None:
        """The bound that the client has exceeded, if it is too far behind."""
        if len(self.bodies) > OUTBOX_LIMIT:
            return f"{OUTBOX_LIMIT} messages"
        return f"{OUTBOX_BYTES} bytes" if self.num_bytes > OUTBOX_BYTES else None

    def append(self, body: bytes) -> None:
        self.bodies.append(body)
        self.num_bytes += len(body)

    def popleft(self) -> None:
        self.num_bytes -= len(self.bodies.popleft())


class Clients:
    """The clients that have sent Connect, with the messages that are still to be sent to each."""

    def __init__(
        self,
        link: RouterChannel,
        monitor: PidfdMonitor,
        engine: EngineCore,
        epoch: int,
        clock: Callable[[], float],
    ) -> None:
        self._link = link
        self._monitor = monitor
        self._engine = engine
        self._epoch = epoch
        self._clock = clock
        self._outboxes: dict[bytes, Outbox] = {}
        self._events = EventLog(epoch, engine.snapshot_kv_events)
        self._num_bad_frames_logged = 0

    @property
    def is_behind(self) -> bool:
        """Whether messages or events wait for any client."""
        return any(outbox.bodies for outbox in self._outboxes.values()) or bool(
            self._events.waiting()
        )

    def drain(self) -> None:
        """Handle the messages that have arrived, up to the bounds of a turn; flush the outboxes."""
        deadline, num_bytes = self._clock() + DRAIN_S, 0
        for received in self._link.drain(DRAIN_LIMIT):
            self._on_frame(received)
            num_bytes += len(received.body)
            if num_bytes >= DRAIN_BYTES or self._clock() >= deadline:
                break
        for peer in [peer for peer, outbox in self._outboxes.items() if outbox.bodies]:
            self._flush(peer)

    def _on_frame(self, received: Received) -> None:
        try:
            message = decode_from_client(received.body)
        except ProtocolError as problem:
            self._refuse_unreadable(received, str(problem))
            return
        try:
            self._handle(received.peer, received.header.epoch, message)
        except AssertionError:
            raise  # the state is wrong; the next core gets the right one from the clients
        except Exception:
            log.exception("%s of a client failed", type(message).__name__)
            self._answer_failed(received.peer, message)

    def _refuse_unreadable(self, received: Received, problem: str) -> None:
        """Answer a message that cannot be decoded. If it is a request, only that one ends."""
        peer, header, body = received
        self._link.count_bad_frame(peer, problem)
        request_id = request_id_of_add(body) if header.epoch == self._epoch else None
        if request_id is not None:
            self._engine.abort(peer, [request_id])
            error = request_error(problem)
        else:
            error = RequestError(ErrorCode.INVALID, problem[:MAX_TEXT])
        self.send(peer, Refused(request_id, error, header.seq))

    def _answer_failed(self, peer: bytes, message: ClientToCore) -> None:
        if isinstance(message, AddRequest):
            self._give_up(peer, message.request_id, "the request could not be taken in")
        elif isinstance(message, Control):
            self.send(peer, ControlDone(message.number, False, self._engine.pause_mode))
        elif isinstance(message, SubscribeKVEvents):
            self._events.unsubscribe(peer)
            self.send(peer, KVEventsRefused(message.subscription, "the subscription failed"))

    def _handle(self, peer: bytes, epoch: int, message: ClientToCore) -> None:
        if isinstance(message, Connect):
            self._on_connect(peer, message)
        elif epoch != self._epoch or peer not in self._outboxes:
            self._engine.num_fenced_frames += 1
        elif isinstance(message, AddRequest):
            refused = self._engine.add(peer, message)
            if refused is not None:
                self.send(peer, refused)
        elif isinstance(message, AbortRequests):
            self._engine.abort(peer, message.request_ids)
        elif isinstance(message, Control):
            self._engine.control(peer, message)
        elif isinstance(message, SubscribeKVEvents):
            if self._engine.has_kv_events:
                self._events.subscribe(peer, message)
            else:
                reason = "the engine was started without enable_kv_events"
                self.send(peer, KVEventsRefused(message.subscription, reason))
        elif isinstance(message, UnsubscribeKVEvents):
            self._events.unsubscribe(peer)
        elif isinstance(message, KVEventsTaken):
            self._events.taken(peer)

    def _on_connect(self, peer: bytes, message: Connect) -> None:
        """Start afresh with a client; a known one has lost a frame and resends everything."""
        num_aborted = self._engine.drop_client(peer)
        if num_aborted:
            log.info("client begins anew: %d requests aborted", num_aborted)
        self._events.forget(peer)
        self._outboxes[peer] = Outbox()
        self._monitor.add(peer, message.pid)
        self.send(peer, self._engine.status())

    def dead(self, ready: Iterable[object]) -> list[bytes]:
        return self._monitor.dead(ready)

    def lose(self, peer: bytes, why: str) -> None:
        """Forget a client, if it is known, and abort its requests."""
        if self._outboxes.pop(peer, None) is None:
            return
        self._monitor.remove(peer)
        self._link.forget(peer)
        self._events.forget(peer)
        num_aborted = self._engine.drop_client(peer)
        severity = logging.INFO if num_aborted else logging.DEBUG
        log.log(severity, "client %s: %d requests aborted", why, num_aborted)

    def send_outgoing(self) -> None:
        """Send the messages of this turn except outputs, and events to clients that keep up."""
        for peer, message in self._engine.take_outgoing():
            self.send(peer, message)
        self._events.append(self._engine.take_kv_events())
        for peer in self._events.waiting():
            if not self._outboxes[peer].bodies:
                self._send_events(peer)

    def _send_events(self, peer: bytes) -> None:
        try:
            batch = self._events.take_batch(peer)
        except AssertionError:
            raise
        except Exception:
            log.exception("events for a client failed")
            self.send(peer, self._events.refuse(peer, "the events could not be sent"))
        else:
            self.send(peer, batch)

    def send(self, peer: bytes, message: CoreToClient) -> None:
        """Send a message now or as soon as there is room; drop it if the client is gone."""
        outbox = self._outboxes.get(peer)
        if outbox is None:
            return
        body = encode(message)
        if len(body) > MAX_FRAME_BYTES:
            self._send_in_parts(peer, message)
            return
        outbox.append(body)
        self._flush(peer)

    def _send_in_parts(self, peer: bytes, message: CoreToClient) -> None:
        assert isinstance(message, StepOutputs), "no other message grows with the requests"
        rows = message.outputs
        if len(rows) == 1:
            self._give_up(peer, rows[0].request_id, "the output exceeds a frame of the wire")
            return
        half = len(rows) // 2
        self.send(peer, StepOutputs(rows[:half]))
        self.send(peer, StepOutputs(rows[half:]))

    def _give_up(self, peer: bytes, request_id: int, why: str) -> None:
        self._engine.abort(peer, [request_id])
        self.send(peer, Refused(request_id, RequestError(ErrorCode.INTERNAL, why)))

    def _flush(self, peer: bytes) -> None:
        outbox = self._outboxes[peer]
        try:
            while outbox.bodies and self._link.send(peer, self._epoch, outbox.bodies[0]):
                outbox.popleft()
        except PeerGone:
            self.lose(peer, "has disconnected")
            return
        excess = outbox.excess
        if excess is not None:
            self.lose(peer, f"has left {excess} unread")

    def report(self, status: Status) -> None:
        """Send the status to all clients, and log the unreadable messages since the last call."""
        for peer in list(self._outboxes):
            self.send(peer, status)
        num_bad = self._link.num_bad_frames - self._num_bad_frames_logged
        bad = self._link.last_bad_frame
        if num_bad and bad is not None:
            self._num_bad_frames_logged += num_bad
            log.warning("clients sent %d unreadable messages, the last: %s", num_bad, bad.reason)
