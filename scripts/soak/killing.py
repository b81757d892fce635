"""Kills workers and cores in turn, at random points of a run's progress."""

import asyncio
import random
from collections.abc import Sequence

from scripts.soak.engine import SoakEngine

ROLES = ("worker", "core")
_LONGEST_PAUSE_S = 0.05
_TIMEOUT_S = 60.0


def draw_points(rng: random.Random, first: int, last: int, count: int) -> list[int]:
    """Numbers of ended requests at which to kill, in order."""
    return sorted(rng.randrange(first, last) for _ in range(count))


class Killer:
    """Follows a run; the run waits for it, so that kills do not pile up at its end."""

    def __init__(
        self, engine: SoakEngine, rng: random.Random, points: Sequence[int], slack: int
    ) -> None:
        """Plan kills.

        Args:
            engine: whose processes die.
            rng: draws the moments.
            points: how many requests have ended before each kill.
            slack: how many more may begin before it has happened.
        """
        self._engine = engine
        self._rng = rng
        self._points = points
        self._slack = slack
        self._num_ended = 0
        self._reached = asyncio.Event()
        self._moved = asyncio.Event()
        self.num_kills = 0

    def ended(self, num_requests: int) -> None:
        """So many requests have ended by now."""
        self._num_ended = num_requests
        if self.num_kills < len(self._points) and num_requests >= self._points[self.num_kills]:
            self._reached.set()

    async def admit(self, number: int) -> None:
        """Wait until this request may begin."""
        while (
            self.num_kills < len(self._points)
            and number > self._points[self.num_kills] + self._slack
        ):
            await self._moved.wait()

    async def run(self) -> None:
        """Kill at all points.

        Raises:
            EngineLost: there is nobody left to kill.
        """
        for index, point in enumerate(self._points):
            while self._num_ended < point:
                self._reached.clear()
                await self._reached.wait()
            await asyncio.sleep(self._rng.uniform(0.0, _LONGEST_PAUSE_S))
            await self._engine.kill(ROLES[index % len(ROLES)], _TIMEOUT_S)
            self.num_kills += 1
            self._moved.set()
            self._moved.clear()
