"""Kills and stops workers and cores in turn, at random points of a run's progress."""

import asyncio
import random
import signal
import time
from collections.abc import Sequence
from typing import NamedTuple

from protocol.lifecycle import ProcessState
from scripts.testing import is_alive
from tests.chaos import processes
from tests.chaos.engine import Engine, EngineFailed

ROLES = ("worker", "core")
_LONGEST_PAUSE_S = 0.05
_POLL_S = 0.01
_TIMEOUT_S = 60.0


class FaultEvent(NamedTuple):
    """A process to kill, or to stop until the supervisor replaces it."""

    point: int
    """Number of requests that have ended before."""
    role: str
    number: signal.Signals


def draw_faults(
    rng: random.Random, first: int, last: int, num_kills: int, num_stops: int = 0
) -> list[FaultEvent]:
    """Draw faults between two numbers of ended requests; each kind hits the roles in turn."""
    faults = []
    for number, count in ((signal.SIGKILL, num_kills), (signal.SIGSTOP, num_stops)):
        points = sorted(rng.randrange(first, last) for _ in range(count))
        faults += [
            FaultEvent(point, ROLES[i % len(ROLES)], number) for i, point in enumerate(points)
        ]
    return sorted(faults)


class FaultInjector:
    """Injects faults during a run; requests wait for them, so that no fault is left at its end."""

    def __init__(
        self, engine: Engine, rng: random.Random, faults: Sequence[FaultEvent], slack: int
    ) -> None:
        """Plan faults.

        Args:
            engine: the processes to kill.
            rng: draws the moments.
            faults: in order.
            slack: number of further requests that may start before a due fault has been injected.
        """
        self._engine = engine
        self._rng = rng
        self._faults = faults
        self._slack = slack
        self._num_ended = 0
        self._reached = asyncio.Event()
        self._moved = asyncio.Event()
        self._num_done = 0
        self.num_kills = 0
        self.stops_s: list[float] = []
        """The time from each SIGSTOP until the supervisor has killed the process."""

    def ended(self, num_requests: int) -> None:
        """Record the number of requests that have ended."""
        self._num_ended = num_requests
        if (
            self._num_done < len(self._faults)
            and num_requests >= self._faults[self._num_done].point
        ):
            self._reached.set()

    async def admit(self, number: int) -> None:
        """Wait until this request may start."""
        while (
            self._num_done < len(self._faults)
            and number > self._faults[self._num_done].point + self._slack
        ):
            await self._moved.wait()

    async def run(self) -> None:
        """Inject all faults.

        Raises:
            EngineFailed: there is no process to signal, or a stopped one is not replaced.
        """
        for fault in self._faults:
            while self._num_ended < fault.point:
                self._reached.clear()
                await self._reached.wait()
            await asyncio.sleep(self._rng.uniform(0.0, _LONGEST_PAUSE_S))
            pid = await inject(self._engine, fault.role, fault.number)
            if fault.number is signal.SIGSTOP:
                self.stops_s.append(await _wait_gone(self._engine, pid))
            else:
                self.num_kills += 1
            self._num_done += 1
            self._moved.set()
            self._moved.clear()


async def inject(engine: Engine, role: str, number: signal.Signals) -> int:
    """Send a signal to a ready process of a role, as soon as there is one; returns its pid.

    Raises:
        EngineFailed: there is none within a minute.
    """
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        reply = await engine.status()
        for row in [] if reply is None else reply.processes:
            if str(row.role) != role or row.state is not ProcessState.READY:
                continue
            if row.pid is not None and processes.kill(row.pid, number) is not None:
                return row.pid
        await asyncio.sleep(_POLL_S)
    raise EngineFailed(f"no {role} to signal within {_TIMEOUT_S:g} s:\n{engine.log_tail()}")


async def _wait_gone(engine: Engine, pid: int) -> float:
    """Wait until a process has ended; returns the seconds.

    Raises:
        EngineFailed: it is alive after a minute.
    """
    began = time.monotonic()
    while is_alive(pid):
        if time.monotonic() > began + _TIMEOUT_S:
            text = f"process {pid} is stopped for {_TIMEOUT_S:g} s and is not replaced"
            raise EngineFailed(f"{text}:\n{engine.log_tail()}")
        await asyncio.sleep(_POLL_S)
    return time.monotonic() - began
