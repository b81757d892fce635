"""Kills at a steady rate while streams follow one another, on an engine with default settings.

No failpoints, no rounds: at random times the worker or the core gets SIGKILL, whatever it is doing.
Each stream that ends is followed by another, and each is compared with the golden run.
"""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path

from tests.chaos import processes
from tests.chaos.checker import Harm, Violation, check_stream
from tests.chaos.engine import Engine, EngineFailed
from tests.chaos.faults import Fault
from tests.chaos.injection import DETECTION, Kill
from tests.chaos.recording import Recording
from tests.chaos.rounds import RoundResult
from tests.chaos.session import (
    DEFAULT_KILLS,
    NULL_BLOCKS,
    NULL_FLAGS,
    Session,
    SessionOptions,
)
from tests.chaos.stalls import detections_s, stall_s
from tests.chaos.workload import PARSER_FLAGS

_MIN_SHARE, _GREATEST_SHARE = 0.5, 1.5
"""The bounds of the time between two kills, as shares of the mean."""
_POLL_S = 0.01
_IDLE_TIMEOUT_S = 10.0
_PHASE = "steady"
_KINDS = ("greedy", "seeded", "penalties", "stop")
"""One sequence and a short prompt each: a stall is recovery, not the length of a context."""


class SteadySession(Session):
    """Kills at a steady rate."""

    def __init__(
        self, options: SessionOptions, base: Path, log: Callable[[str], None], every_s: float
    ) -> None:
        """Prepare to kill one process every `every_s` seconds in the mean."""
        super().__init__(options, base, log)
        self._every_s = every_s
        self._kinds = options.kinds or _KINDS
        self._rng = random.Random(options.seed)
        self._results: dict[str, RoundResult] = {}
        """The results by the role of the killed process."""
        self._checked = RoundResult(0, "all streams", "", options.seed)
        """Every stream, and what was wrong with it: kills of both roles hit the same streams."""
        self._is_over = False

    def _flags(self) -> tuple[str, ...]:
        blocks = ("--num-gpu-blocks-override", str(NULL_BLOCKS))
        flags = (*NULL_FLAGS, *blocks) if self._options.model == "null" else ()
        return (*flags, *PARSER_FLAGS) if self._options.kinds else flags

    async def _run_rounds(self, engine: Engine) -> None:
        """Record the golden run, then kill under streams until enough processes have died.

        Raises:
            EngineFailed: neither worker nor core is to be killed, or a process does not come back.
        """
        available = await engine.roles()
        roles = [fault for fault in (Fault.WORKER, Fault.CORE) if fault in self._options.faults]
        if not roles:
            raise EngineFailed("kills at a steady rate are of worker and core")
        self.golden = await self._golden(engine)
        self.results.append(await self._control_round(engine))
        self._results = {
            role: RoundResult(number, role, _PHASE, self._options.seed)
            for number, role in enumerate(roles, 1)
            if role in available
        }
        self.results += [self._checked, *self._results.values()]
        began = time.monotonic()
        engine.arm(DETECTION, "note@*")
        lanes = [self._lane(engine, number) for number in range(self._options.num_streams)]
        streams = asyncio.ensure_future(asyncio.gather(*lanes))
        try:
            kills = await self._kill(engine)
        except BaseException:
            streams.cancel()
            raise
        self._is_over = True
        recordings = [recording for lane in await streams for recording in lane]
        await engine.ready(without={kill.pid for kill in kills})
        seconds = time.monotonic() - began
        for result in self._results.values():
            result.seconds = seconds / len(self._results)
        self._measure(engine, began, kills, recordings)
        if not await engine.is_idle(_IDLE_TIMEOUT_S, has_news=True):
            text = "requests run on without a reader, or blocks are held"
            self.results[-1].violations.append(Violation(Harm.MISMATCHED, "engine", text))

    async def _lane(self, engine: Engine, number: int) -> list[Recording]:
        """Read one stream after the other; their requests differ only in the cache salt."""
        recordings: list[Recording] = []
        while not self._is_over:
            request = self._requests(f"steady-{len(recordings)}")[number]
            deadline = time.monotonic() + self._options.stream_timeout_s
            recording = await engine.client.record(request, deadline)
            recordings.append(recording)
            result = self._checked
            result.num_streams += 1
            found = check_stream(recording, self.golden[number])
            result.violations += found
            result.recordings += [recording] if found else []
        return recordings

    async def _kill(self, engine: Engine) -> list[Kill]:
        kills: list[Kill] = []
        num_kills = self._options.num_kills or DEFAULT_KILLS
        while len(kills) < num_kills:
            share = self._rng.uniform(_MIN_SHARE, _GREATEST_SHARE)
            await asyncio.sleep(self._every_s * share)
            role = self._rng.choice(list(self._results))
            kills.append(await self._kill_one(engine, role, {kill.pid for kill in kills}))
            self._results[role].kills.append(kills[-1])
        await asyncio.sleep(self._every_s)
        return kills

    async def _kill_one(self, engine: Engine, role: str, killed: set[int]) -> Kill:
        """Kill the process of a role, as soon as there is one that was not killed before.

        Raises:
            EngineFailed: there is none for as long as a stream would wait.
        """
        deadline = time.monotonic() + self._options.stream_timeout_s
        while time.monotonic() < deadline:
            found = await engine.members(role)
            for member in found[len(killed) % max(1, len(found)) :][:1]:  # each rank in turn
                moment = None if member.pid in killed else processes.kill(member.pid)
                if moment is not None:
                    where = member.rank, member.replica
                    return Kill(moment, role, member.pid, "outside", *where)
            await asyncio.sleep(_POLL_S)
        raise EngineFailed(f"no {role} for {self._options.stream_timeout_s:g} s")

    def _measure(
        self, engine: Engine, began: float, kills: list[Kill], recordings: list[Recording]
    ) -> None:
        """Attribute to each kill the longest silence around it of each stream under way."""
        notices = [firing.time for firing in engine.firings(began) if firing.name == DETECTION]
        for kill, detection in zip(kills, detections_s(kills, notices), strict=True):
            result = self._results[kill.role]
            stalls = [stall_s(recording, [kill.time]) for recording in recordings]
            known = [stall for stall in stalls if stall is not None]
            result.stalls_s += known
            result.detections_s += [] if detection is None else [detection]
            result.num_unnoticed += detection is None
            longest = f"{max(known):.2f} s" if known else "none"
            at = f"{kill.time - began:.1f} s"
            self._log(f"{at}: {kill.role} {kill.pid}, longest stall {longest} of {len(known)}")
