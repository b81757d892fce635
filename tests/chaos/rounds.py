"""One round: open all streams, inject the faults of a cell, wait for every end, compare."""

import asyncio
import contextlib
import time
from collections.abc import Sequence

import msgspec

from tests.chaos.checker import Excuse, Harm, Violation, check_stream
from tests.chaos.engine import Engine
from tests.chaos.faults import Cell, Fault, Phase
from tests.chaos.injection import DETECTION, Injection, Kill
from tests.chaos.recording import End, Recording
from tests.chaos.stalls import detections_s, stall_s, wait_s
from tests.chaos.timing import phase_problem
from tests.chaos.workload import ChaosRequest

RETURN_TIMEOUT_S = 120.0
_IDLE_TIMEOUT_S = 10.0
_PROBE_INTERVAL_S = 0.02
_PROBE_TIMEOUT_S = 10.0
"""A socket that listens refuses nothing; the client itself may be late on a busy machine."""
_NUM_LATE = 4


class RoundResult(msgspec.Struct):
    """The result of one round."""

    number: int
    fault: str
    phase: str
    seed: int
    rank: int | None = None
    """The rank of the worker that was to be killed; None: any."""
    kills: list[Kill] = []
    num_streams: int = 0
    num_broken: int = 0
    """Streams that ended with a permitted break of their connection."""
    num_resumed: int = 0
    """Streams that were resumed after a permitted break of their connection."""
    num_deferred: int = 0
    """Responses with 429 or 503."""
    violations: list[Violation] = []
    stalls_s: list[float] = []
    """Longest silence around a kill, for each stream that had begun before it and continued."""
    waits_s: list[float] = []
    """Time to the first event, for each stream that was open at the last kill and had not begun."""
    detections_s: list[float] = []
    """The time from a kill until the supervisor has reaped the process."""
    num_unnoticed: int = 0
    """Kills that the supervisor has not noticed."""
    recovery_s: float | None = None
    """The time from the last kill until every process was ready again."""
    seconds: float = 0.0
    missed: str | None = None
    """Why no process was killed in the requested phase, if so."""
    recordings: list[Recording] = []
    """Recordings of the streams with violations."""

    @property
    def is_single(self) -> bool:
        """Whether all victims died at once, while every other process was ready."""
        has_sequel = self.phase in (Phase.LOAD, Phase.RECOVERY)
        roles = [kill.role for kill in self.kills]
        is_once = self.fault == Fault.LOST or len(set(roles)) == len(roles)
        return bool(roles) and not has_sequel and is_once


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
            typical_s: duration of the golden run.
            stream_timeout_s: the longest duration of a stream.
        """
        self._engine = engine
        self._golden = golden
        self._typical_s = typical_s
        self._stream_timeout_s = stream_timeout_s

    async def run(self, cell: Cell, requests: Sequence[ChaosRequest]) -> RoundResult:
        """Run one round; afterwards the engine is ready, or EngineFailed is raised."""
        began = time.monotonic()
        result = RoundResult(cell.number, cell.fault, cell.phase, cell.seed, cell.rank)
        self._engine.disarm()
        before = self._engine.files(), self._engine.surroundings()
        injection = Injection(self._engine, cell, self._typical_s, len(requests))
        await injection.prepare()
        probing = asyncio.create_task(self._probe(cell))
        try:
            recordings, late = await self._inject(cell, injection, requests)
        finally:
            probing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                result.violations += await probing
        self._engine.disarm()
        result.kills = injection.kills
        result.num_streams = len(recordings) + len(late)
        result.violations += [Violation(Harm.FAILED, "engine", text) for text in injection.problems]
        problem = phase_problem(cell.phase, [kill.time for kill in result.kills], recordings)
        result.missed = injection.missed or problem
        self._check(result, cell, injection, recordings, self._golden)
        self._check(result, cell, injection, late, self._golden[: len(late)])
        await self._settle(result, cell, before)
        self._time(result, cell, injection, began)
        return result

    async def _inject(
        self, cell: Cell, injection: Injection, requests: Sequence[ChaosRequest]
    ) -> tuple[list[Recording], list[Recording]]:
        """Return the recordings of the round, and of the requests sent after the faults."""
        client = self._engine.client
        deadline = time.monotonic() + self._stream_timeout_s
        if cell.phase is Phase.IDLE:
            await injection.run(lambda: False)
            streams = asyncio.ensure_future(client.record_all(requests, deadline))
            if cell.fault is Fault.LOST:
                await asyncio.wait([streams])
            await injection.wait_return(RETURN_TIMEOUT_S)
            return await streams, []
        streams = asyncio.ensure_future(client.record_all(requests, deadline))
        await injection.run(streams.done)
        late = asyncio.ensure_future(
            client.record_all(self._late(requests), deadline, may_leave=False)
        )
        if cell.fault is Fault.LOST:  # nothing is replaced before all streams have ended
            await asyncio.wait([streams, late])
        await injection.wait_return(RETURN_TIMEOUT_S)
        return await streams, await late

    def _late(self, requests: Sequence[ChaosRequest]) -> list[ChaosRequest]:
        """Return requests to send right after the faults, while processes are being replaced."""
        found = []
        for request in requests[:_NUM_LATE]:
            body = dict(request.body)
            if "cache_salt" in body:
                body["cache_salt"] = f"{body['cache_salt']}-late"
            names = {"name": f"late-{request.name}", "request_id": f"late-{request.request_id}"}
            found.append(msgspec.structs.replace(request, body=body, **names))
        return found

    async def _probe(self, cell: Cell) -> list[Violation]:
        """Check that the listening socket, which outlives every API process, never refuses."""
        if cell.fault is Fault.SUPERVISOR:
            return []
        with contextlib.suppress(asyncio.CancelledError):
            while await self._engine.client.is_reachable(_PROBE_TIMEOUT_S):
                await asyncio.sleep(_PROBE_INTERVAL_S)
            return [Violation(Harm.FAILED, "probe", "a connection was refused")]
        return []

    def _check(
        self,
        result: RoundResult,
        cell: Cell,
        injection: Injection,
        recordings: Sequence[Recording],
        golden: Sequence[Recording],
    ) -> None:
        times = [kill.time for kill in result.kills]
        deaths = [kill.time for kill in result.kills if kill.role in Fault.holders()]
        excuse = Excuse(deaths, is_away=cell.fault is Fault.SUPERVISOR)
        for recording, expected in zip(recordings, golden, strict=True):
            found = check_stream(recording, expected, excuse)
            result.violations += found
            result.recordings += [recording] if found else []
            result.num_deferred += len(recording.deferrals)
            is_cut = recording.end is End.CUT
            result.num_broken += is_cut and not found
            result.num_resumed += bool(recording.breaks) and not found
            if found or is_cut:
                continue
            stall = stall_s(recording, times, injection.returned_at)
            wait = wait_s(recording, times)
            result.stalls_s += [] if stall is None else [stall]
            result.waits_s += [] if wait is None else [wait]

    async def _settle(
        self, result: RoundResult, cell: Cell, before: tuple[set[str], set[str]]
    ) -> None:
        """Check that no request runs on and no file is left behind."""
        roles = ("core", "api", "supervisor", "replica")
        has_news = any(kill.role in roles for kill in result.kills)
        if not await self._engine.is_idle(_IDLE_TIMEOUT_S, has_news=has_news):
            text = "abandoned requests still run, or blocks are held"
            result.violations.append(Violation(Harm.MISMATCHED, "engine", text))
        files, surroundings = before
        left = self._engine.files() - files
        left |= self._engine.surroundings() - surroundings
        if cell.fault is Fault.SUPERVISOR and left:
            violation = Violation(Harm.FAILED, "engine", f"left behind: {sorted(left)}")
            result.violations.append(violation)

    def _time(self, result: RoundResult, cell: Cell, injection: Injection, began: float) -> None:
        result.seconds = time.monotonic() - began
        if not result.kills:
            return
        if injection.returned_at is not None:
            result.recovery_s = injection.returned_at - result.kills[-1].time
        if cell.fault.hangs or cell.fault in (Fault.SUPERVISOR, Fault.LOST):
            return
        notices = [f.time for f in self._engine.firings(began) if f.name == DETECTION]
        kills = sorted(result.kills, key=lambda kill: kill.time)
        found = list(zip(kills, detections_s(kills, notices), strict=True))
        result.num_unnoticed = sum(seconds is None for _, seconds in found)
        result.detections_s = [
            seconds
            for kill, seconds in found
            if seconds is not None and not kill.how.endswith(DETECTION)  # it was paused there
        ]
