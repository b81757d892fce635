"""Ends requests that cannot continue, and gives their clients the reason."""

import logging

from core_proc.outputs.owners import Owners, owner_of
from core_proc.request import Request
from core_proc.scheduler import Scheduler
from protocol.api_core import ErrorCode, Refused, RequestError
from protocol.message import MAX_TEXT

log = logging.getLogger("troika.core")


class Refusals:
    """Sends `Refused` to clients whose requests have ended without a final output."""

    def __init__(self, scheduler: Scheduler, owners: Owners) -> None:
        self._scheduler = scheduler
        self._owners = owners

    def send_failures(self) -> None:
        """Refuse the requests that have failed in the scheduler."""
        for failure in self._scheduler.take_failures():
            level = logging.DEBUG if failure.code is ErrorCode.INVALID else logging.ERROR
            log.log(level, "request %d failed: %s", failure.request.req_id, failure.error)
            self._send(failure.request, failure.error, failure.code, failure.param)

    def give_up(self, request: Request, error: Exception) -> None:
        """End a request whose outputs cannot be built; a failed assertion ends the core instead."""
        if isinstance(error, AssertionError):
            raise error
        log.error("outputs of request %d failed", request.req_id, exc_info=error)
        self.end(request, "the request's output could not be built")

    def end(self, request: Request, why: str, code: ErrorCode = ErrorCode.INTERNAL) -> None:
        """End a request in any state."""
        self._scheduler.abort_request(request.req_id)
        self._send(request, why, code)

    def _send(self, request: Request, why: str, code: ErrorCode, param: str | None = None) -> None:
        """Send `Refused` to the client of a request that has ended, if it still waits for it."""
        if request.owner is not None and self._owners.waits_for(request):  # a canary has none
            owner = owner_of(request)
            self._owners.remove(owner.client, owner.request_id)
            error = RequestError(code, why[:MAX_TEXT], param)
            self._owners.post(owner.client, Refused(owner.request_id, error))
