"""The order in which requests are decoded and submitted: a few per turn of the event loop.

A burst of requests that are read in one turn would otherwise be handled in the order of arrival, a
millisecond each. Here the clients take turns, so a burst of one client delays the requests of
another by one turn of the loop. The parts of large bodies are read in the same way.
"""

import asyncio

from api_proc.fairness.waiting import WaitingRequests

_PER_TURN = 16
"""Requests that are admitted in one turn of the event loop: about ten milliseconds of work."""
PARTS_PER_TURN = 8
"""Parts of bodies that are read in one turn: two megabytes, which are copied three times."""


class Admission:
    """Admits the requests of one event loop."""

    def __init__(self, per_turn: int = _PER_TURN) -> None:
        """Admit `per_turn` requests in one turn of the loop."""
        self._waiting = WaitingRequests()
        self._per_turn = self._num_left = per_turn
        """Requests that may still be admitted in this turn; then none waits."""
        self._is_armed = False

    async def enter(self) -> None:
        """Return at once, or in a later turn of the loop if many requests have come in this one.

        ApiError 503: the wait was too long.
        """
        if self._num_left:
            self._num_left -= 1
            self._arm()
            return
        await self._waiting.wait()

    def _arm(self) -> None:
        if not self._is_armed:
            self._is_armed = True
            asyncio.get_running_loop().call_soon(self._begin_turn)

    def _begin_turn(self) -> None:
        self._is_armed = False
        self._num_left = self._per_turn
        while self._num_left and self._waiting.admit():
            self._num_left -= 1
        if self._num_left < self._per_turn:
            self._arm()
