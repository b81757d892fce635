"""The death of a supervisor: its children exit, and another supervisor starts in its place."""

import asyncio
import time

from tests.chaos.engine import Engine

ORPHANS_TIMEOUT_S = 5.0
"""The longest time from a supervisor's death until no process of its engine is alive."""
_POLL_S = 0.02


async def replace_supervisor(engine: Engine, died_at: float) -> list[str]:
    """Wait until all its children have exited, then start another one; does not wait for it.

    Args:
        engine: its supervisor was killed.
        died_at: monotonic.

    Returns:
        The problems, in words.
    """
    problems = []
    while orphans := engine.living() - {engine.supervisor_pid}:
        if time.monotonic() > died_at + ORPHANS_TIMEOUT_S:
            problems.append(f"{len(orphans)} processes live {ORPHANS_TIMEOUT_S:g} s later")
            break
        await asyncio.sleep(_POLL_S)
    engine.reap()
    engine.start()
    return problems
