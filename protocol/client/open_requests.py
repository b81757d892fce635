"""A client's open requests: the ledger, each request's receiver, and the effects of messages.

No sockets here: `send` takes messages for the core. It may drop them, since everything open is sent
again as soon as the core's next epoch is agreed on: `resend` then yields it for the link's backlog.
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
from protocol.client.errors import RequestFailed, failure_of
from protocol.client.ledger import MOVES_MAX, Ledger
from protocol.message import encode
from protocol.process.failpoints import failpoint
from protocol.transport.channel import MAX_FRAME_BYTES


class Receiver(Protocol):
    """Receives the outputs of one request."""

    def deliver(self, output: RequestOutput) -> None:
        """Take new tokens; an output with a `finish_reason` is the last."""

    def fail(self, error: RequestFailed) -> None:
        """The request has ended with an error."""


class OpenRequests:
    """All requests that were accepted and have not ended."""

    def __init__(self, ledger: Ledger, send: Callable[[bytes], None]) -> None:
        self.ledger = ledger
        self._send = send
        self._receivers: dict[int, Receiver] = {}
        self._unsent: deque[int] = deque()
        """Requests of a resend that were not sent yet, oldest first; new ones queue behind them."""

    def __len__(self) -> int:
        return len(self._receivers)

    def accept(self, add: AddRequest, body: bytes, receiver: Receiver) -> None:
        """Enter a checked request, and send it as `body`; Overloaded if too much is open."""
        if self._enter(add, receiver, 0.0):
            self._send(body)

    def adopt(self, add: AddRequest, receiver: Receiver, age_s: float) -> None:
        """As `accept`, for a request that an earlier incarnation of this client accepted."""
        if self._enter(add, receiver, age_s):
            self._send_again(msgspec.structs.replace(add, age_s=age_s))

    def _enter(self, add: AddRequest, receiver: Receiver, age_s: float) -> bool:
        """Return whether it may be sent now: during a resend, older requests come first."""
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

    def move(self, request_id: int, other: "OpenRequests") -> bool:
        """Let a request go on at the core of another client; here it ends.

        False: it has ended, or was moved `MOVES_MAX` times since its last output. Then the cores
        where it was have died of it, perhaps.
        """
        if request_id not in self._receivers or self.ledger.num_moves(request_id) >= MOVES_MAX:
            return False
        entry, receiver = self.ledger.leave(request_id), self._receivers.pop(request_id)
        self._send(encode(AbortRequests([request_id])))
        entry.num_moves += 1
        entry.num_repairs = 0
        other.ledger.enter(entry)
        other._receivers[request_id] = receiver
        if other._unsent:
            other._unsent.append(request_id)
        else:
            other._send_again(entry.resumed(other.ledger.clock()))
        return True

    def resend(self) -> Iterator[bytes]:
        """Begin to send everything open to a core that does not know it, oldest first."""
        self._unsent = deque(self.ledger)
        return self._unsent_bodies(self.ledger.clock())

    def _unsent_bodies(self, now: float) -> Iterator[bytes]:
        """Yield requests with their ages at one time for all, so that their order is exact."""
        while self._unsent:
            add = self.ledger.resumed(self._unsent.popleft(), now)
            if add is not None and (body := self._encode(add)) is not None:
                yield body

    def take(self, output: RequestOutput) -> None:
        """Deliver what is new in an output of the core, or repair what is missing before it."""
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
        """Send requests again, of which an output is missing; too many repairs end a request."""
        for request_id in request_ids:
            try:
                add = self.ledger.repair(request_id)
            except RequestFailed as failure:
                self._give_up(request_id, failure)
                continue
            if add is not None:
                self._send_again(add)

    def refuse(self, request_id: int, error: RequestError) -> None:
        """Enter a refusal by the core."""
        if self.ledger.fail(request_id):
            self._receivers.pop(request_id).fail(failure_of(error))

    def fail_all(self, error: RequestError) -> None:
        """End everything here and in the core."""
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
