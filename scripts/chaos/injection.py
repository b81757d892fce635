"""Carries out one cell of the plan against a running engine while its streams are open."""

import asyncio
import random
import signal
import time
from collections.abc import Callable

import msgspec

from scripts.chaos import processes
from scripts.chaos.engine import Engine, Firing
from scripts.chaos.faults import HOLD_MS, Cell, Fault, Phase, Place, place, places_again

DETECTION = "supervisor.after_death"
"""Its notes tell when a death was noticed."""
_POLL_S = 0.002
_RETURN_TIMEOUT_S = 8.0
"""For a successor to exist, after a death or a hang."""
_AGAIN_TIMEOUT_S = 60.0
"""For a successor to load its model and take over."""
_KILLS_OF_THRICE = 3
_LONGEST_RANDOM = 3


class Kill(msgspec.Struct, frozen=True):
    """One process that was killed, or stopped."""

    time: float
    """Monotonic, of the signal."""
    role: str
    pid: int
    how: str


class Injection:
    """The faults of one round."""

    def __init__(self, engine: Engine, cell: Cell, typical_s: float) -> None:
        """Prepare.

        Args:
            engine: ready.
            cell: who and when.
            typical_s: how long the streams take without faults.
        """
        self.kills: list[Kill] = []
        self.missed: str | None = None
        """Which failpoint was not reached, if any."""
        self._engine = engine
        self._cell = cell
        self._typical_s = typical_s
        self._armed_at = 0.0
        self._rng = random.Random(cell.seed)
        self._place = place(cell, self._rng)
        self._signal = signal.SIGSTOP if cell.fault.hangs else signal.SIGKILL

    def prepare(self) -> None:
        """Arm what marks the phase; right before the streams open."""
        if self._place is not None:
            self._arm(self._place)

    async def run(self, is_over: Callable[[], bool]) -> None:
        """Kill; returns when no more deaths are planned, or `is_over` says that it is too late."""
        phase = self._cell.phase
        if self._place is not None:
            await self._kill_at(self._place, is_over)
        elif phase in (Phase.LOAD, Phase.RECOVERY):
            await self._kill_twice()
        elif phase is Phase.THRICE:
            await asyncio.sleep(self._rng.uniform(0.1, 0.5) * self._typical_s)
            await self._kill_repeatedly(_KILLS_OF_THRICE)
        elif phase is Phase.IDLE:
            await self._kill(self._cell.fault.roles, "outside")
        else:
            await asyncio.sleep(self._rng.uniform(0, self._typical_s))
            most = 1 if self._cell.fault.hangs else _LONGEST_RANDOM
            await self._kill_repeatedly(self._rng.randint(1, most))

    async def _kill_at(self, where: Place, is_over: Callable[[], bool]) -> None:
        fired = await self._wait_fired(where, is_over)
        if fired is None:
            return
        if where.by_itself:
            role = where.failpoint.partition(".")[0]
            self.kills.append(Kill(fired.time, role, fired.pid, f"itself at {where.failpoint}"))
        else:
            await self._kill(self._cell.fault.roles, f"outside at {where.failpoint}")

    async def _kill_twice(self) -> None:
        """First whoever is to be replaced, then whoever replaces it."""
        await asyncio.sleep(self._rng.uniform(0.1, 0.6) * self._typical_s)
        again = places_again(self._cell)
        for where in again:
            self._arm(where)
        fault = self._cell.fault
        is_alone = fault not in (Fault.STANDBY, Fault.ZYGOTE, Fault.SUPERVISOR)
        await self._kill(fault.roles if is_alone else ("worker",), "outside")
        deadline = time.monotonic() + _AGAIN_TIMEOUT_S
        for where in again:
            await self._kill_at(where, lambda: time.monotonic() > deadline)

    async def _kill_repeatedly(self, num_kills: int) -> None:
        for number in range(num_kills):
            if number and self._cell.fault is Fault.SUPERVISOR:
                return  # there is one, and its end is the engine's
            if number:
                await asyncio.sleep(self._rng.uniform(0.05, 2.0))
            await self._kill(self._cell.fault.roles, "outside")

    async def _kill(self, roles: tuple[str, ...], how: str) -> None:
        """All processes of these roles, as soon as they exist, one right after the other."""
        pids = {role: await self._pids(role) for role in roles}
        for role, living in pids.items():
            for pid in living[:1] if role == "worker" else living:
                moment = processes.kill(pid, self._signal)
                if moment is not None:
                    self.kills.append(Kill(moment, role, pid, how))

    async def _pids(self, role: str) -> list[int]:
        deadline = time.monotonic() + _RETURN_TIMEOUT_S
        while time.monotonic() < deadline:
            pids = await self._engine.pids(role)
            if pids:
                return pids
            await asyncio.sleep(_POLL_S)
        return []

    def _arm(self, where: Place) -> None:
        own_action = "stop" if self._cell.fault.hangs else "kill9"
        action = own_action if where.by_itself else f"delay:{HOLD_MS}"
        self._engine.arm(where.failpoint, f"{action}@{where.hit}")
        self._armed_at = time.monotonic()

    async def _wait_fired(self, where: Place, is_over: Callable[[], bool]) -> Firing | None:
        while True:
            ended = is_over()
            for firing in self._engine.firings(self._armed_at):
                if firing.name == where.failpoint and firing.action != "note":
                    return firing
            if ended:
                self.missed = where.failpoint
                return None
            await asyncio.sleep(_POLL_S)
