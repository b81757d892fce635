"""A deadline whose TimeoutError states what did not happen in time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


@asynccontextmanager
async def deadline(timeout_s: float, problem: str) -> AsyncIterator[None]:
    """Limit the body's time; the TimeoutError states the problem and the limit."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise TimeoutError(f"{problem} within {timeout_s:g} s") from None
