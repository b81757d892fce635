"""A request that outlives its connections: one HTTP request with all its sequences.

The outputs of its sequences go into histories, which connections read.
"""

import asyncio
from collections.abc import Iterator
from typing import NamedTuple

from api_proc.bodies import SamplingBody
from api_proc.errors import ApiError
from api_proc.fairness.budget import Lease
from api_proc.resumption.history import History
from api_proc.resumption.session_log import (
    AcceptRecord,
    BindRecord,
    OutputRecord,
    Row,
    SentRecord,
    StopRecord,
    packed,
)
from api_proc.text.output_sequence import Prompt
from protocol.api_core import ErrorCode, RequestError
from protocol.client.errors import RequestFailed
from protocol.message import Message


class DecodedRequest(NamedTuple):
    body: SamplingBody
    prompts: list[Prompt]


class Session:
    """A request whose client may come back: its histories, and how long they are kept."""

    def __init__(self, accepted: AcceptRecord, decoded: DecodedRequest, lease: Lease) -> None:
        self.accepted = accepted
        self.body = decoded.body
        self.prompts = decoded.prompts
        self.histories: list[History] = []
        self.submitted = asyncio.Event()
        """Set once all sequences are submitted, or the session is removed before that."""
        self.num_attached = 0
        """Connections that read it."""
        self.is_known = False
        """Whether the client knows its id, and may come back."""
        self.is_sent = False
        """Whether a complete answer was sent; it is kept because its end may have been lost."""
        self.lease = lease
        self.expiry: asyncio.TimerHandle | None = None
        self.deadline: asyncio.TimerHandle | None = None

    @property
    def request_id(self) -> str:
        return self.accepted.request_id

    @property
    def is_ended(self) -> bool:
        return all(history.is_ended for history in self.histories)

    def records(self) -> Iterator[Message]:
        """Yield the session's records for a snapshot."""
        yield packed(self.accepted)
        number = self.accepted.number
        for index, history in enumerate(self.histories):
            for part in history.parts():
                yield OutputRecord([Row(number, index, part)])
            if history.resumed_inexactly:
                fingerprint = self.accepted.adds[index].fingerprint
                yield BindRecord(number, index, fingerprint, is_exact=False)
            if history.is_stopped:
                yield StopRecord(number, index)
        if self.is_sent:
            yield SentRecord(number)


def request_not_found(request_id: str) -> ApiError:
    message = f"request {request_id} does not exist or is over"
    return ApiError(404, message, code="request_not_found")


def deadline_error(timeout_s: float) -> RequestFailed:
    """Return the error of a request whose client's `timeout` is over."""
    message = f"timeout: the request did not end within {timeout_s:g} s"
    return RequestFailed(RequestError(ErrorCode.DEADLINE, message))
