"""The supervisor's list of processes, as the live view shows it."""

import asyncio
import contextlib
import time
from collections.abc import Callable

from protocol.lifecycle import StatusReply

FRESH_S = 0.2
"""Any number of readers together send one query in this time."""
TIMEOUT_S = 0.5


class ProcessList:
    """Asks the supervisor only while a client reads the list."""

    def __init__(self, ask: Callable[[], object]) -> None:
        """`ask` sends one query; `receive` gets the reply, unless it is lost."""
        self._ask = ask
        self._asked_at = float("-inf")
        self._reply: StatusReply | None = None
        self._arrival = asyncio.Event()

    async def latest(self) -> StatusReply | None:
        """Return a recent list; None: the supervisor does not answer in time."""
        now = time.monotonic()
        if now - self._asked_at >= FRESH_S:
            self._asked_at = now
            self._arrival.clear()
            self._ask()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TIMEOUT_S):
                await self._arrival.wait()
        return self._reply if self._arrival.is_set() else None

    def receive(self, reply: StatusReply) -> None:
        self._reply = reply
        self._arrival.set()
