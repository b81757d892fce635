"""A gate that admits few requests at a time; their clients take turns.

A client with many requests at the gate delays only these: a request of another client waits for one
request of each client before it, however many have arrived earlier.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from api_proc.errors import ApiError
from api_proc.fairness.waiting import WaitingRequests


class FairGate:
    """Admits at most `size` requests at a time; all methods are called in one event loop."""

    def __init__(self, size: int = 1) -> None:
        self._num_free = size
        self._waiting = WaitingRequests()

    def is_full(self) -> bool:
        """Return whether the next request has to wait."""
        return self._num_free == 0

    async def enter(self) -> None:
        """Enter, or wait until `leave` admits this request; ApiError 503: for too long."""
        if self._num_free:
            self._num_free -= 1
            return
        await self._waiting.wait(self.leave)

    def leave(self) -> None:
        """Admit the next request that still waits, or free a place."""
        if not self._waiting.admit():
            self._num_free += 1

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Enter, and leave at the end of the block."""
        await self.enter()
        try:
            yield
        finally:
            self.leave()

    @asynccontextmanager
    async def inside_if_soon(self) -> AsyncIterator[None]:
        """Wait as `inside`, but run the block without a place if the wait is too long."""
        is_inside = True
        try:
            await self.enter()
        except ApiError:
            is_inside = False
        try:
            yield
        finally:
            if is_inside:
                self.leave()
