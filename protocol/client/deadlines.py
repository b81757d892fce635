"""A deadline whose TimeoutError states what did not happen in time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager


@asynccontextmanager
async def deadline(
    timeout_s: float, problem: str, find_reason: Callable[[], str] = str
) -> AsyncIterator[None]:
    """Limit the body's time; the TimeoutError states the problem, the limit and the reason."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        reason = find_reason()
        because = f": {reason}" if reason else ""
        raise TimeoutError(f"{problem} within {timeout_s:g} s{because}") from None
