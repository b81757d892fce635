"""A client's open requests: the ledger, each request's receiver, and the effects of messages.

Opens no sockets: `send` accepts messages for the core. It may drop them, since everything open is
sent again as soon as the core's next epoch is agreed on: `resend` then yields the messages for the
link's backlog.

A request that has begun is sent only to an engine with the fingerprint of the one that began it.
Otherwise it is held until it is moved, or released to continue inexactly.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import msgspec

from protocol.api_core import (
    AbortRequests,
    AddRequest,
    ErrorCode,
    RequestError,
    RequestOutput,
    encode_add,
)
from protocol.client.errors import RequestFailed, failure_of, refusal_of
from protocol.client.ledger import MOVES_MAX, Entry, Ledger
from protocol.message import encode
from protocol.process.failpoints import failpoint
from protocol.transport.channel import MAX_FRAME_BYTES


class Receiver(Protocol):
    """Receives the outputs of one request."""

    def deliver(self, output: RequestOutput) -> None:
        """Receive new tokens; an output with a `finish_reason` is the last."""

    def fail(self, error: RequestFailed) -> None:
        """The request has ended with an error."""

    def rebind(self, fingerprint: str, *, is_exact: bool) -> None:
        """An engine with another fingerprint computes the request from now on.

        Without `is_exact`, later outputs may not match those delivered before.
        """

    def stored_at(self, blocks_at: str) -> None:
        """The request was moved; from now on its KV blocks are read at this address."""


class OpenRequests:
    """All requests that were accepted and have not ended."""

    def __init__(
        self, ledger: Ledger, send: Callable[[bytes], None], *, is_replica: bool = False
    ) -> None:
        """`is_replica`: other clients may take over requests."""
        self.ledger = ledger
        self._send = send
        self._is_replica = is_replica
        self._receivers: dict[int, Receiver] = {}
        self._unsent: deque[int] = deque()
        """Requests of a resend that are not sent yet, oldest first; new ones are appended."""
        self._held: dict[int, float] = {}
        """Requests that the core cannot continue exactly, with the seconds for which each is
        held."""
        self.fingerprint = ""
        """Fingerprint of the core's facts; empty: not known yet."""
        self._holds_all = False
        """True if the core has another model: no request is sent to it."""
        self.num_inexact = 0
        """Requests begun by engines with another fingerprint and continued by this one."""

    def __len__(self) -> int:
        return len(self._receivers)

    def ids(self) -> list[int]:
        """Return the numbers of all requests, oldest first."""
        return list(self.ledger)

    def accept(self, add: AddRequest, body: bytes, receiver: Receiver) -> None:
        """Add a checked request and send it as `body`; Overloaded if too much is open."""
        if self._enter(add, receiver, 0.0):
            self._send(body)

    def adopt(self, add: AddRequest, receiver: Receiver, age_s: float) -> None:
        """Add and continue a request that an earlier incarnation of this client accepted."""
        if self._enter(add, receiver, age_s):
            self._resume(add.request_id)

    def _enter(self, add: AddRequest, receiver: Receiver, age_s: float) -> bool:
        """Return whether it may be sent now: during a resend, older requests are sent first."""
        self.ledger.accept(add, age_s)
        self._receivers[add.request_id] = receiver
        failpoint("ledger.after_accept")
        if self._unsent:
            self._unsent.append(add.request_id)
        return not self._unsent

    def cancel(self, request_id: int) -> None:
        """End a request here and in the core, if it is open."""
        self._receivers.pop(request_id, None)
        if self.ledger.fail(request_id):
            self._send(encode(AbortRequests([request_id])))

    def entry(self, request_id: int) -> Entry | None:
        """Return an open request, or None if it has ended."""
        return self.ledger.get(request_id)

    def move(
        self,
        request_id: int,
        other: "OpenRequests",
        *,
        is_exact: bool = True,
        blocks_at: str = "",
    ) -> bool:
        """Move a request to the core of another client; here it ends.

        Without `is_exact`, it moves even if the other engine cannot continue it exactly.
        `blocks_at` is the address at which the other engine reads the blocks of this machine.
        Returns False if the request has ended, or was moved `MOVES_MAX` times since its last
        output: it may have killed the cores that had it.
        """
        entry = self.ledger.get(request_id)
        if entry is None or entry.num_moves >= MOVES_MAX:
            return False
        self.ledger.fail(request_id)
        receiver = self._receivers.pop(request_id)
        self._send(encode(AbortRequests([request_id])))
        entry.num_moves += 1
        if blocks_at:  # otherwise it may still need the blocks of the previous machine
            entry.add = msgspec.structs.replace(entry.add, blocks_at=blocks_at)
        entry.num_repairs = entry.num_expected_cached = 0
        other._take_over(entry, receiver, is_exact=is_exact)
        return True

    def _take_over(self, entry: Entry, receiver: Receiver, *, is_exact: bool) -> None:
        """Continue a request that was moved here."""
        request_id = entry.add.request_id
        self.ledger.enter(entry)
        self._receivers[request_id] = receiver
        if not is_exact:
            self._bind(entry)
        if self._unsent:
            self._unsent.append(request_id)
        else:
            self._resume(request_id)

    def note_place(self, request_id: int, blocks_at: str) -> None:
        """Pass the address of its KV blocks to the receiver of a request that was moved here."""
        if (receiver := self._receivers.get(request_id)) is not None:
            receiver.stored_at(blocks_at)

    def resend(self, fingerprint: str, *, holds_all: bool = False) -> Iterator[bytes]:
        """Begin to send everything open to a core that does not know it, oldest first.

        `holds_all`: the core has another model, so everything is held instead.
        """
        self.fingerprint, self._holds_all = fingerprint, holds_all
        self._unsent = deque(self.ledger)
        return self._unsent_bodies(self.ledger.clock())

    def _unsent_bodies(self, now: float) -> Iterator[bytes]:
        """Yield requests with their ages at the same time, so that their order is exact."""
        while self._unsent:
            body = self._body_to_resume(self._unsent.popleft(), now)
            if body is not None:
                yield body

    def _resume(self, request_id: int) -> None:
        """Send a request that the core does not know, unless it must be held."""
        body = self._body_to_resume(request_id, self.ledger.clock())
        if body is not None:
            self._send(body)

    def _body_to_resume(self, request_id: int, now: float) -> bytes | None:
        entry = self.ledger.get(request_id)
        if entry is None:
            return None
        if self._holds_all:
            self._held.setdefault(request_id, 0.0)
            return None
        if self.fingerprint and entry.add.fingerprint != self.fingerprint:
            if entry.has_begun and entry.add.fingerprint:
                self._held.setdefault(request_id, 0.0)
                return None
            self._bind(entry)
        self._held.pop(request_id, None)
        return self._encode(entry.resumed(now))

    # Fingerprints -------------------------------------------------------------------------------

    def follow(self, fingerprint: str, *, holds_all: bool = False) -> None:
        """Hold or send requests if the facts of the same core, or the expected model, have changed.

        Requests that it could not continue with the old facts are sent if the new facts match.
        `holds_all`: as for `resend`.
        """
        if fingerprint == self.fingerprint and holds_all is self._holds_all:
            return
        self.fingerprint, self._holds_all = fingerprint, holds_all
        for request_id in list(self.ledger):
            entry = self.ledger.get(request_id)
            if entry is None:
                continue
            if request_id in self._held:
                self._resume(request_id)
            elif self._holds_all:
                self._held[request_id] = 0.0
                self._send(encode(AbortRequests([request_id])))
            else:
                self._bind(entry, is_exact=True)

    def held_ids(self) -> list[int]:
        """Return the requests that the core cannot continue exactly."""
        return [request_id for request_id in self._held if self.ledger.get(request_id) is not None]

    def release(self, request_id: int) -> None:
        """Continue a held request inexactly."""
        entry = self.ledger.get(request_id)
        if self._held.pop(request_id, None) is not None and entry is not None:
            self._bind(entry)
            self._resume(request_id)

    def fail_held(self, elapsed_s: float, limit_s: float, error: RequestError) -> None:
        """Add to the time for which requests are held, and end those held for too long."""
        for request_id in list(self._held):
            self._held[request_id] += elapsed_s
            if self.ledger.get(request_id) is None:
                del self._held[request_id]
            elif self._held[request_id] > limit_s:
                del self._held[request_id]
                self.refuse(request_id, error)

    def _bind(self, entry: Entry, *, is_exact: bool | None = None) -> None:
        """Note that the core computes a request from now on."""
        if entry.add.fingerprint == self.fingerprint:
            return
        if is_exact is None:
            is_exact = not entry.has_begun or not entry.add.fingerprint
        self.num_inexact += not is_exact
        entry.add = msgspec.structs.replace(entry.add, fingerprint=self.fingerprint)
        self._receivers[entry.add.request_id].rebind(self.fingerprint, is_exact=is_exact)

    # Messages of the core ------------------------------------------------------------------------

    def take(self, output: RequestOutput) -> None:
        """Deliver the new part of an output, or repair the gap before it."""
        if output.request_id in self._held:
            return  # sent before the abort, by a core that turned out to have another model
        try:
            news = self.ledger.take(output)
        except RequestFailed as failure:
            self._give_up(output.request_id, failure)
            return
        if isinstance(news, AddRequest):
            self._send_again(news)
        elif news is not None:
            if news.finish_reason is None:
                receiver = self._receivers[news.request_id]
            else:
                receiver = self._receivers.pop(news.request_id)
            receiver.deliver(news)

    def repair(self, request_ids: Iterable[int]) -> None:
        """Send requests with a missing output again; too many repairs end a request."""
        for request_id in request_ids:
            try:
                add = self.ledger.repair(request_id)
            except RequestFailed as failure:
                self._give_up(request_id, failure)
                continue
            if add is not None:
                self._send_again(add)

    def refuse(self, request_id: int, error: RequestError) -> None:
        """Process a refusal by the core.

        With other replicas, a request that a draining core refuses stays open: it was accepted
        here, and it is moved as soon as the core's status shows that it drains.
        """
        if self._is_replica and error.code is ErrorCode.DRAINING:
            return
        entry = self.ledger.get(request_id)
        if entry is not None:
            was_accepted = entry.add.resent or entry.has_begun
            failure = failure_of(error) if was_accepted else refusal_of(error)
            self.ledger.fail(request_id)
            self._receivers.pop(request_id).fail(failure)

    def fail_all(self, error: RequestError) -> None:
        """End all requests here and in the core."""
        receivers, self._receivers = self._receivers, {}
        for request_id, receiver in receivers.items():
            self.ledger.fail(request_id)
            receiver.fail(failure_of(error))
        if receivers:
            self._send(encode(AbortRequests(list(receivers))))

    def _send_again(self, add: AddRequest) -> None:
        if (body := self._encode(add)) is not None:
            self._send(body)

    def _encode(self, add: AddRequest) -> bytes | None:
        """Encode a request with its outputs; end it if it has outgrown a frame."""
        body = encode_add(add)
        if len(body) <= MAX_FRAME_BYTES:
            return body
        message = f"{len(body)} bytes to send again exceed the {MAX_FRAME_BYTES} of a frame"
        self._give_up(add.request_id, failure_of(RequestError(ErrorCode.TOO_LONG, message)))
        return None

    def _give_up(self, request_id: int, failure: RequestFailed) -> None:
        """Fail a request here and end it in the core."""
        self.ledger.fail(request_id)
        self._receivers.pop(request_id).fail(failure)
        self._send(encode(AbortRequests([request_id])))
