"""After the death of a supervisor: its children leave, and another one starts in its place."""

import asyncio
import time

from scripts.chaos.engine import Engine

ORPHANS_TIMEOUT_S = 5.0
"""From the supervisor's death until nothing of its engine lives any more."""
_POLL_S = 0.02


async def replace_supervisor(engine: Engine, died_at: float) -> list[str]:
    """Wait for the end of all that it had started, and start another; it is not ready yet.

    Args:
        engine: whose supervisor was killed.
        died_at: monotonic.

    Returns:
        What was wrong, in words.
    """
    problems = []
    while orphans := engine.living() - {engine.supervisor_pid}:
        if time.monotonic() > died_at + ORPHANS_TIMEOUT_S:
            problems.append(f"{len(orphans)} processes live {ORPHANS_TIMEOUT_S:g} s later")
            break
        await asyncio.sleep(_POLL_S)
    engine.bury()
    engine.start()
    return problems
