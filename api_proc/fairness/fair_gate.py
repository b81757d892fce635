"""A gate that admits few requests at a time; their clients take turns.

A client with many requests at the gate delays only these: a request of another client waits for one
request of each client before it, however many have arrived earlier.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from contextvars import ContextVar

from protocol.turns import Account, Turns

current_client: ContextVar[str] = ContextVar("current_client", default="")
"""The client whose request the current task serves: an API key or an address."""


class FairGate:
    """Admits at most `size` requests at a time; all methods are called in one event loop."""

    def __init__(self, size: int = 1) -> None:
        self._num_free = size
        self._waiting: Turns[asyncio.Future[None]] = Turns()

    def is_full(self) -> bool:
        """Return whether the next request has to wait."""
        return self._num_free == 0

    async def enter(self) -> None:
        """Enter, or wait until `leave` admits this request."""
        if self._num_free:
            self._num_free -= 1
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.put(Account(current_client.get()), admitted)
        try:
            await admitted
        except asyncio.CancelledError:
            if not admitted.cancelled():  # it was admitted at the same time
                self.leave()
            raise

    def leave(self) -> None:
        """Admit the next request that still waits, or free a place."""
        while (found := self._waiting.take()) is not None:
            _, admitted = found
            if not admitted.done():
                admitted.set_result(None)
                return
        self._num_free += 1

    @asynccontextmanager
    async def inside(self) -> AsyncIterator[None]:
        """Enter, and leave at the end of the block."""
        await self.enter()
        try:
            yield
        finally:
            self.leave()
