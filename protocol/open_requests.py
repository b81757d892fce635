"""What a client has open: the ledger, whoever reads each request, and what follows from messages.

No sockets here: `send` takes what is to go to the core, and may drop it, since a core that is new
to this client gets everything again.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

from protocol.api_core import (
    AbortRequests,
    AddRequest,
    ErrorCode,
    RequestError,
    RequestOutput,
    encode_add,
)
from protocol.channel import MAX_FRAME_BYTES
from protocol.errors import RequestFailed, failure_of
from protocol.failpoints import failpoint
from protocol.ledger import Ledger
from protocol.message import encode


class Receiver(Protocol):
    """Whoever is told what one request brings."""

    def deliver(self, output: RequestOutput) -> None:
        """Take what is new; with a `finish_reason`, the last of it."""

    def fail(self, error: RequestFailed) -> None:
        """Nothing more will come."""


class OpenRequests:
    """Every request that was accepted and has not ended."""

    def __init__(self, ledger: Ledger, send: Callable[[bytes], None]) -> None:
        self.ledger = ledger
        self._send = send
        self._receivers: dict[int, Receiver] = {}

    def __len__(self) -> int:
        return len(self._receivers)

    def accept(self, add: AddRequest, body: bytes, receiver: Receiver) -> None:
        """Take responsibility for a request and send it.

        Args:
            body: `add` for the wire.

        Raises:
            RequestFailed: too much is open already.
        """
        self.ledger.accept(add)
        self._receivers[add.request_id] = receiver
        failpoint("ledger.after_accept")
        self._send(body)

    def adopt(self, add: AddRequest, receiver: Receiver) -> None:
        """Go on with a request that an earlier incarnation of this client had accepted.

        Args:
            add: under a number of this incarnation, with the outputs that are known.

        Raises:
            RequestFailed: too much is open already.
        """
        self.ledger.accept(add)
        self._receivers[add.request_id] = receiver
        failpoint("ledger.after_accept")
        self._send_again(add)

    def cancel(self, request_id: int) -> None:
        """Forget a request, if it is open, and have the core forget it."""
        self._receivers.pop(request_id, None)
        abort = self.ledger.cancel(request_id)
        if abort is not None:
            self._send(encode(abort))

    def send_all(self) -> None:
        """Tell a core that knows nothing of this client, oldest first."""
        for add in list(self.ledger.open_requests()):
            self._send_again(add)

    def take(self, output: RequestOutput) -> None:
        """Enter one output of the core: deliver what is new, repair what is missing."""
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
        body = encode_add(add)
        if len(body) <= MAX_FRAME_BYTES:
            self._send(body)
            return
        message = f"{len(body)} bytes to send again exceed the {MAX_FRAME_BYTES} of a frame"
        self._give_up(add.request_id, failure_of(RequestError(ErrorCode.TOO_LONG, message)))

    def _give_up(self, request_id: int, failure: RequestFailed) -> None:
        """Fail one request here and end it in the core."""
        self.ledger.fail(request_id)
        self._receivers.pop(request_id).fail(failure)
        self._send(encode(AbortRequests([request_id])))
