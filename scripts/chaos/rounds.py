"""One round: open all streams, inject the faults of a cell, wait for every end, compare."""

import asyncio
import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec

from scripts.chaos.checker import Harm, Violation, check_stream
from scripts.chaos.engine import KEPT_FILES, Engine
from scripts.chaos.faults import Cell, Fault, Phase
from scripts.chaos.injection import DETECTION, Injection, Kill
from scripts.chaos.recording import End, Recording
from scripts.chaos.workload import ChaosRequest

RETURN_TIMEOUT_S = 60.0
ORPHANS_TIMEOUT_S = 2.0
_IDLE_TIMEOUT_S = 10.0
_PROBE_INTERVAL_S = 0.02
_NUM_LATE = 4
_AFTERMATH_S = 1.0
"""After the last kill; a gap that begins later is none of its."""
_DETECTION_WINDOW_S = 5.0


class RoundResult(msgspec.Struct):
    """What became of one round."""

    number: int
    fault: str
    phase: str
    seed: int
    kills: list[Kill] = []
    num_streams: int = 0
    num_broken: int = 0
    """Streams whose connection broke where it may."""
    num_deferred: int = 0
    """Answers that asked to come again later."""
    violations: list[Violation] = []
    stalls_s: list[float] = []
    """Of each stream that had begun before a kill and went on: its longest silence around that."""
    detections_s: list[float] = []
    """From a kill to the supervisor's notice."""
    recovery_s: float | None = None
    """From the last kill until every process was ready again."""
    seconds: float = 0.0
    missed: str | None = None
    """The failpoint that was not reached: nobody was killed there."""
    recordings: list[Recording] = []
    """Those of the streams with violations."""


class RoundRunner:
    """Runs rounds against one engine."""

    def __init__(
        self,
        engine: Engine,
        golden: Sequence[Recording],
        typical_s: float,
        stream_timeout_s: float,
    ) -> None:
        """Take the golden run.

        Args:
            engine: ready.
            golden: recordings of the round's requests without faults, in their order.
            typical_s: how long that took.
            stream_timeout_s: from opening a stream to giving up on it.
        """
        self._engine = engine
        self._golden = golden
        self._typical_s = typical_s
        self._stream_timeout_s = stream_timeout_s

    async def run(self, cell: Cell, requests: Sequence[ChaosRequest]) -> RoundResult:
        """Run one round; afterwards the engine is ready, or EngineFailed is raised."""
        began = time.monotonic()
        result = RoundResult(cell.number, cell.fault, cell.phase, cell.seed)
        self._engine.disarm()
        self._engine.arm(DETECTION, "note@*")
        files = self._engine.files()
        injection = Injection(self._engine, cell, self._typical_s)
        probing = asyncio.create_task(self._probe(result, cell))
        try:
            recordings, late = await self._inject(cell, injection, requests, result)
        finally:
            probing.cancel()
        self._engine.disarm()
        result.kills, result.missed = injection.kills, injection.missed
        result.num_streams = len(recordings) + len(late)
        self._judge(result, cell, recordings, self._golden)
        self._judge(result, cell, late, self._golden[: len(late)])
        await self._settle(result, cell, files)
        if not cell.fault.hangs:
            result.detections_s = self._detections(began, result.kills)
        result.seconds = time.monotonic() - began
        return result

    async def _inject(
        self,
        cell: Cell,
        injection: Injection,
        requests: Sequence[ChaosRequest],
        result: RoundResult,
    ) -> tuple[list[Recording], list[Recording]]:
        """The round's recordings, and those of requests that came after the faults."""
        client = self._engine.client
        deadline = time.monotonic() + self._stream_timeout_s
        if cell.phase is Phase.IDLE:
            await injection.run(lambda: False)
            if cell.fault is Fault.SUPERVISOR:
                await self._restart(result, injection)
            return await client.record_all(requests, deadline), []
        injection.prepare()
        streams = asyncio.ensure_future(client.record_all(requests, deadline))
        await injection.run(streams.done)
        if cell.fault is Fault.SUPERVISOR and injection.kills:
            await self._restart(result, injection)
        late = await client.record_all(self._late(requests), deadline, may_leave=False)
        return await streams, late

    def _late(self, requests: Sequence[ChaosRequest]) -> list[ChaosRequest]:
        """Requests for right after the faults, when processes are still being replaced."""
        found = []
        for request in requests[:_NUM_LATE]:
            body = dict(request.body)
            if "cache_salt" in body:
                body["cache_salt"] = f"{body['cache_salt']}-late"
            found.append(msgspec.structs.replace(request, name=f"late-{request.name}", body=body))
        return found

    async def _probe(self, result: RoundResult, cell: Cell) -> None:
        """The listening socket outlives every API process: it never refuses."""
        if cell.fault is Fault.SUPERVISOR:
            return
        while True:
            if not await self._engine.client.is_reachable():
                violation = Violation(Harm.FAILED, "probe", "a connection was refused")
                result.violations.append(violation)
                return
            await asyncio.sleep(_PROBE_INTERVAL_S)

    def _judge(
        self,
        result: RoundResult,
        cell: Cell,
        recordings: Sequence[Recording],
        golden: Sequence[Recording],
    ) -> None:
        for recording, expected in zip(recordings, golden, strict=True):
            may_break = cell.fault.breaks_streams and any(
                recording.opened_at <= kill.time <= recording.ended_at for kill in result.kills
            )
            found = check_stream(recording, expected, may_break=may_break)
            result.violations += found
            result.recordings += [recording] if found else []
            result.num_deferred += recording.num_deferred
            result.num_broken += may_break and recording.end not in (End.DONE, End.LEFT)
            stall = stall_s(recording, [kill.time for kill in result.kills])
            if stall is not None and not may_break and not found:
                result.stalls_s.append(stall)

    async def _settle(self, result: RoundResult, cell: Cell, files: set[str]) -> None:
        """Everybody is back, nothing runs on, nothing was left lying about."""
        await self._engine.ready(RETURN_TIMEOUT_S)
        if result.kills:
            result.recovery_s = time.monotonic() - result.kills[-1].time
        if not await self._engine.is_idle(_IDLE_TIMEOUT_S):
            violation = Violation(Harm.MISMATCHED, "engine", "requests run on that nobody reads")
            result.violations.append(violation)
        left = self._engine.files() - files - KEPT_FILES
        if cell.fault is Fault.SUPERVISOR and left:
            violation = Violation(Harm.FAILED, "engine", f"left in the run dir: {sorted(left)}")
            result.violations.append(violation)

    async def _restart(self, result: RoundResult, injection: Injection) -> None:
        """After the supervisor's death: all its children leave in time, and another can start."""
        died_at = injection.kills[-1].time
        while orphans := self._engine.living() - {self._engine.supervisor_pid}:
            if time.monotonic() > died_at + ORPHANS_TIMEOUT_S:
                text = f"{len(orphans)} processes live {ORPHANS_TIMEOUT_S:g} s later"
                result.violations.append(Violation(Harm.FAILED, "engine", text))
                break
            await asyncio.sleep(0.02)
        self._engine.bury()
        self._engine.start()
        await self._engine.ready()

    def _detections(self, began: float, kills: Sequence[Kill]) -> list[float]:
        notes = [f.time for f in self._engine.firings(began) if f.name == DETECTION]
        found = []
        for kill in kills:
            delays = [note - kill.time for note in notes if note >= kill.time]
            if kill.role != "supervisor" and delays and min(delays) < _DETECTION_WINDOW_S:
                found.append(min(delays))
        return found


def stall_s(recording: Recording, kill_times: Sequence[float]) -> float | None:
    """The longest silence of a stream around the kills; None if it was not under way then.

    Only what lies between two events counts, so neither the wait for the first token nor the
    silence after the last one.
    """
    if not kill_times:
        return None
    first, last = kill_times[0], kill_times[-1] + _AFTERMATH_S
    times = [event.time for event in recording.events]
    gaps = [
        after - before for before, after in pairwise(times) if after >= first and before <= last
    ]
    if not gaps or times[0] > first:
        return None
    return max(gaps)
