"""Kills and stops workers and cores in turn, at random points of a run's progress."""

import asyncio
import random
import signal
from collections.abc import Sequence
from typing import NamedTuple

from scripts.soak.engine import SoakEngine

ROLES = ("worker", "core")
_LONGEST_PAUSE_S = 0.05
_TIMEOUT_S = 60.0


class Blow(NamedTuple):
    """One process that is to die, or to hang until it is detected."""

    point: int
    """How many requests have ended before."""
    role: str
    number: signal.Signals


def draw_blows(
    rng: random.Random, first: int, last: int, num_kills: int, num_stops: int = 0
) -> list[Blow]:
    """Blows between two numbers of ended requests, in order: each kind hits the roles in turn."""
    blows = []
    for number, count in ((signal.SIGKILL, num_kills), (signal.SIGSTOP, num_stops)):
        points = sorted(rng.randrange(first, last) for _ in range(count))
        blows += [Blow(point, ROLES[i % len(ROLES)], number) for i, point in enumerate(points)]
    return sorted(blows)


class Killer:
    """Follows a run; the run waits for it, so that blows do not pile up at its end."""

    def __init__(
        self, engine: SoakEngine, rng: random.Random, blows: Sequence[Blow], slack: int
    ) -> None:
        """Plan blows.

        Args:
            engine: whose processes die.
            rng: draws the moments.
            blows: in order.
            slack: how many more requests may begin before each has happened.
        """
        self._engine = engine
        self._rng = rng
        self._blows = blows
        self._slack = slack
        self._num_ended = 0
        self._reached = asyncio.Event()
        self._moved = asyncio.Event()
        self._num_done = 0
        self.num_kills = 0
        self.stops_s: list[float] = []
        """From each SIGSTOP to the end of the process that had it, by another's hand."""

    def ended(self, num_requests: int) -> None:
        """So many requests have ended by now."""
        self._num_ended = num_requests
        if self._num_done < len(self._blows) and num_requests >= self._blows[self._num_done].point:
            self._reached.set()

    async def admit(self, number: int) -> None:
        """Wait until this request may begin."""
        while (
            self._num_done < len(self._blows)
            and number > self._blows[self._num_done].point + self._slack
        ):
            await self._moved.wait()

    async def run(self) -> None:
        """Strike at all points.

        Raises:
            EngineLost: there is nobody left to strike, or nobody replaces who hangs.
        """
        for blow in self._blows:
            while self._num_ended < blow.point:
                self._reached.clear()
                await self._reached.wait()
            await asyncio.sleep(self._rng.uniform(0.0, _LONGEST_PAUSE_S))
            pid = await self._engine.strike(blow.role, blow.number, _TIMEOUT_S)
            if blow.number is signal.SIGSTOP:
                self.stops_s.append(await self._engine.wait_gone(pid, _TIMEOUT_S))
            else:
                self.num_kills += 1
            self._num_done += 1
            self._moved.set()
            self._moved.clear()
