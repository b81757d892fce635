"""The order in which requests are decoded and submitted: a few per turn of the event loop.

A burst of requests that are read in one turn would otherwise be handled in the order of arrival, a
millisecond each. Here the clients take turns, so a burst of one client delays the requests of
another by one turn of the loop.
"""

import asyncio

from api_proc.fairness.fair_gate import current_client
from protocol.turns import Account, Turns

_PER_TURN = 16
"""Requests that are admitted in one turn of the event loop: about ten milliseconds of work."""


class Admission:
    """Admits the requests of one event loop."""

    def __init__(self) -> None:
        self._waiting: Turns[asyncio.Future[None]] = Turns()
        self._num_left = _PER_TURN
        """Requests that may still be admitted in this turn; then none waits."""
        self._is_armed = False

    async def enter(self) -> None:
        """Return at once, or in a later turn of the loop if many requests have come in this one."""
        if self._num_left:
            self._num_left -= 1
            self._arm()
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(Account(current_client.get()), admitted)
        await admitted

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_armed = False
        self._num_left = _PER_TURN
        while self._num_left and (found := self._waiting.take()) is not None:
            _, admitted = found
            if not admitted.done():  # else its task was cancelled
                admitted.set_result(None)
                self._num_left -= 1
        if self._num_left < _PER_TURN:
            self._arm()
