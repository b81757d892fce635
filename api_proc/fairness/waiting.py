"""Requests that wait in one place of the API: their clients take turns, for a limited time each."""

import asyncio
from collections.abc import Callable
from contextvars import ContextVar

from api_proc.errors import unavailable
from protocol.api_core import ErrorCode
from protocol.fairness.account import Account
from protocol.fairness.turns import Turns

MAX_WAIT_S = 60.0
"""Longest wait in one place of the API; then the request is refused with 503."""
_FEW = 64
"""Number of requests that have left, above which they are removed from the queue."""

current_client: ContextVar[str] = ContextVar("current_client", default="")
"""The client whose request the current task serves: an API key or an address."""


class WaitingRequests:
    """The requests of one event loop that wait until `admit` is called for them."""

    def __init__(self) -> None:
        self._turns: Turns[asyncio.Future[None]] = Turns()
        self._num_queued = 0
        self._num_gone = 0
        """Requests in the queue that do not wait any more."""

    async def wait(self, unused: Callable[[], object] = lambda: None) -> None:
        """Wait until it is the turn of this request.

        `unused` is called if the request is cancelled after it was admitted. ApiError 503: it has
        waited for `MAX_WAIT_S`.
        """
        loop = asyncio.get_running_loop()
        admitted: asyncio.Future[None] = loop.create_future()
        self._turns.put(Account(current_client.get()), admitted)
        self._num_queued += 1
        deadline = loop.call_later(MAX_WAIT_S, _expire, admitted)
        try:
            await admitted
        except BaseException:
            if admitted.cancelled() or admitted.exception() is not None:
                self._forget()
            else:
                unused()
            raise
        finally:
            deadline.cancel()

    def admit(self) -> bool:
        """Let the next request proceed; False: none waits."""
        while (found := self._turns.take()) is not None:
            self._num_queued -= 1
            _, admitted = found
            if not admitted.done():
                admitted.set_result(None)
                return True
            self._num_gone -= 1
        return False

    def _forget(self) -> None:
        """Count a request that has left the queue early; the queue is cleared of many such."""
        self._num_gone += 1
        if self._num_gone > max(_FEW, self._num_queued // 2):
            self._turns.keep(lambda admitted: not admitted.done())
            self._num_queued -= self._num_gone
            self._num_gone = 0


def _expire(admitted: asyncio.Future[None]) -> None:
    if not admitted.done():
        text = f"the request has waited for its turn longer than {MAX_WAIT_S:g} s"
        admitted.set_exception(unavailable(text, ErrorCode.OVERLOADED))
