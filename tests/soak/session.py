"""One soak from start to end: warm up, count, run with faults, run without, count again."""

import asyncio
import random
import shutil
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

import msgspec

from protocol.client import AsyncEngineClient
from protocol.lifecycle import ProcessStatus, Role
from tests.chaos.engine import Engine
from tests.soak.clients import Place, SoakClient, read_gauges
from tests.soak.injection import ROLES, FaultEvent, FaultInjector, draw_faults
from tests.soak.report import Outcome, Tally, broken_bounds, counts_of, lives_of
from tests.soak.requests import Workload
from tests.soak.resource_snapshot import ResourceSnapshot, take_snapshot

MODEL = "null"
_READY_TIMEOUT_S = 60.0
_SETTLE_TIMEOUT_S = 15.0
_POLL_S = 0.3


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of a run, which has four parts: warm-up, quiet part, faults, quiet part."""

    num_requests: int
    num_kills: int
    num_stops: int
    num_disconnects: int
    concurrency: int
    embedded_share: float
    num_warm_up: int
    num_first_quiet: int
    num_last_quiet: int
    sample_every: int
    """Requests between two snapshots."""
    seed: int
    flags: list[str]
    """Further flags for the supervisor."""

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """The numbers of requests that have ended after warm-up, quiet, faults, and quiet again."""
        end = self.num_requests
        return self.num_warm_up, self.num_warm_up + self.num_first_quiet, self._noisy_end, end

    @property
    def _noisy_end(self) -> int:
        return self.num_requests - self.num_last_quiet


class Session:
    """One run of a plan."""

    def __init__(self, plan: Plan, base: Path, keep: Path | None = None) -> None:
        """Prepare; `run` starts the engine.

        Args:
            plan: the arguments.
            base: an empty directory with a short path.
            keep: directory for the engine's log.
        """
        self._keep = keep
        self._plan = plan
        self._base = base
        self._rng = random.Random(plan.seed)
        self.tally = Tally()
        self.snapshots: list[ResourceSnapshot] = []
        self._latencies_s = array("f", bytes(4 * plan.num_requests))
        self._next_number = 0
        self._began = time.monotonic()
        self._names: dict[int, str] = {}

    async def run(self) -> Outcome:
        """Run all parts.

        Raises:
            EngineFailed: the engine does not start, or does not become ready again.
        """
        self._engine = Engine(self._base, [MODEL, *self._plan.flags], has_failpoints=False)
        try:
            self._engine.start()
            await self._engine.ready(_READY_TIMEOUT_S)
            async with AsyncEngineClient(self._engine.address) as client:
                self._client = client
                facts = await client.wait_ready(_READY_TIMEOUT_S)
                leaving = frozenset(self._draw_leaving())
                workload = Workload(self._plan.seed, facts, leaving, self._plan.embedded_share)
                self._place = Place("127.0.0.1", self._engine.port, MODEL, client)
                self._clients = [
                    SoakClient(self._place, workload, self.tally, self._latencies_s)
                    for _ in range(self._plan.concurrency)
                ]
                return await self._run_parts()
        finally:
            self._engine.close()
            if self._keep is not None:
                self._keep.mkdir(parents=True, exist_ok=True)
                shutil.copy(self._engine.log_file, self._keep)

    def _draw_leaving(self) -> list[int]:
        """Draw the requests whose clients leave, none of them in the quiet parts."""
        warm, quiet, noisy, _ = self._plan.parts
        numbers = [*range(warm), *range(quiet, noisy)]
        return self._rng.sample(numbers, min(self._plan.num_disconnects, len(numbers)))

    async def _run_parts(self) -> Outcome:
        warm, quiet, noisy, whole = self._plan.parts
        num_first_kills = min(len(ROLES), self._plan.num_kills)
        first_faults = draw_faults(self._rng, warm // 4, max(warm // 2, 1), num_first_kills)
        await self._run_until(warm, first_faults)
        before = await self._settle(None)
        began = time.monotonic()
        await self._run_until(quiet, [])
        num_kills = self._plan.num_kills - num_first_kills
        last = noisy - (noisy - quiet) // 50
        faults = draw_faults(self._rng, quiet, last, num_kills, self._plan.num_stops)
        await self._run_until(noisy, faults)
        await self._run_until(whole, [])
        seconds = time.monotonic() - began
        after = await self._settle(before)
        lives, counts = lives_of(self.snapshots), counts_of(before, after)
        broken = broken_bounds(self.tally, lives, counts)
        latency_ms = self._latency_ms()
        return Outcome(seconds, self.tally, lives, counts, latency_ms, broken)

    async def _run_until(self, end: int, faults: Sequence[FaultEvent]) -> None:
        injector = FaultInjector(self._engine, self._rng, faults, 2 * self._plan.concurrency)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(injector.run())
            for client in self._clients:
                tasks.create_task(self._keep_sending(client, injector, end))
        self.tally.num_kills += injector.num_kills
        self.tally.stops_s += injector.stops_s

    async def _keep_sending(self, client: SoakClient, injector: FaultInjector, end: int) -> None:
        while self._next_number < end:
            number = self._next_number
            self._next_number += 1
            await injector.admit(number)
            await client.send(number)
            injector.ended(self.tally.num_ended)
            if self.tally.num_ended % self._plan.sample_every == 0:
                self.snapshots.append(await self._snapshot())

    async def _settle(self, before: ResourceSnapshot | None) -> ResourceSnapshot:
        """Take a snapshot when all processes and connections are back and counts are stable.

        It is taken after a timeout, too, if counts do not come down to those of `before`.
        """
        await self._engine.ready(_READY_TIMEOUT_S)
        await self._clients[0].probe()
        for client in self._clients:
            await client.close()
        began = time.monotonic()
        previous = await self._snapshot(is_quiet=True)
        while True:
            await asyncio.sleep(_POLL_S)
            snapshot = await self._snapshot(is_quiet=True)
            is_idle = not (snapshot.num_held or snapshot.kv_usage_ppm or snapshot.num_zombies)
            is_fresh = self._client.last_status_time > began
            is_same = all(row.before == row.after for row in counts_of(previous, snapshot))
            is_back = before is None or not any(c.has_grown for c in counts_of(before, snapshot))
            is_late = time.monotonic() >= began + _SETTLE_TIMEOUT_S
            if (is_idle and is_fresh and is_same and is_back) or is_late:
                return snapshot
            previous = snapshot

    async def _snapshot(self, *, is_quiet: bool = False) -> ResourceSnapshot:
        status = self._client.status
        assert status is not None
        reply = await self._engine.status()
        rows = [] if reply is None else reply.processes
        for row in rows:
            if row.pid is not None:
                self._names[row.pid] = f"{row.role} {row.rank}" if row.rank else str(row.role)
        stats = status.stats
        return take_snapshot(
            self._names,
            self._engine.run_dir,
            num_requests=self.tally.num_ended,
            elapsed_s=time.monotonic() - self._began,
            living=self._engine.living() if is_quiet else frozenset(),
            num_held=stats.num_running_reqs
            + stats.num_waiting_reqs
            + self._client.num_open_requests,
            kv_usage_ppm=round(stats.kv_cache_usage * 1e6),
            num_unexpected_restarts=_num_restarts(rows)
            - self.tally.num_kills
            - len(self.tally.stops_s),
            gauges=await read_gauges(self._place) if is_quiet else {},
        )

    def _latency_ms(self) -> dict[str, float]:
        """Return latencies of the first quiet part, and of the end of the last one."""
        warm, quiet, noisy, whole = self._plan.parts
        count = min(quiet - warm, whole - noisy)
        parts = {"first": self._latencies_s[warm : warm + count]}
        parts["last"] = self._latencies_s[whole - count :]
        return {
            f"{name} quiet part p{share}": 1000 * quantile(part, share)
            for name, part in parts.items()
            for share in (50, 99)
        }


def quantile(values: Sequence[float], share: int) -> float:
    """Return the value that `share` percent of the values are below; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, share * len(ordered) // 100)] if ordered else 0.0


def _num_restarts(rows: Sequence[ProcessStatus]) -> int:
    """Count restarts of serving processes; a promoted standby is replaced by another one."""
    standbys = (Role.STANDBY, Role.STANDBY_CORE)
    return sum(row.num_restarts for row in rows if row.role not in standbys)
