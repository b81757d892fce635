"""The report of a soak: slopes of memory, counts before and after, and broken bounds."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from tests.soak.resource_snapshot import ProcessSnapshot, ResourceSnapshot

MAX_SLOPE_MIB = 1.0
"""Per 10,000 requests, for every process that lives long enough."""
MIN_SPAN = 5_000
"""The fewest requests over which a slope counts."""
WARM_UP = 5_000
"""Requests in a process's life before its slope begins: caches fill, pools grow."""
_PER = 10_000
_MIB = 2**20


class Life(msgspec.Struct, frozen=True):
    """One process over the whole run."""

    role: str
    pid: int
    first_request: int
    last_request: int
    slope_mib: float | None
    """The growth of resident memory per 10,000 requests; None: the process lived too shortly."""
    first_mib: float
    last_mib: float


class Counts(msgspec.Struct, frozen=True):
    """One count of a role or of the engine, which must not grow."""

    what: str
    before: int
    after: int

    @property
    def has_grown(self) -> bool:
        return self.after > self.before


class Tally(msgspec.Struct):
    """The results of the requests."""

    num_ended: int = 0
    num_right: int = 0
    num_left: int = 0
    """Correct answers whose client disconnected."""
    num_deferred: int = 0
    """Answers with 429 or 503, and the like of the embedding client."""
    num_resent: int = 0
    """Requests sent again because the server had just closed an idle connection."""
    num_kills: int = 0
    stops_s: list[float] = []
    """For each stopped process: the time until the supervisor killed it."""
    lost: list[str] = []
    mismatched: list[str] = []
    num_lost: int = 0
    num_mismatched: int = 0


class Outcome(msgspec.Struct, frozen=True):
    """The results of a soak."""

    seconds: float
    tally: Tally
    lives: list[Life]
    counts: list[Counts]
    latency_ms: dict[str, float]
    broken: list[str]
    """Broken bounds, in words."""


def theil_sen(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return the median of the slopes between all pairs of points; None without two distinct xs."""
    slopes = [
        (ys[j] - ys[i]) / (xs[j] - xs[i])
        for i in range(len(xs))
        for j in range(i + 1, len(xs))
        if xs[j] != xs[i]
    ]
    return statistics.median(slopes) if slopes else None


def lives_of(snapshots: Sequence[ResourceSnapshot]) -> list[Life]:
    """Return one line for each process that was seen at least twice, longest lives first."""
    seen: dict[tuple[str, int], list[tuple[int, ProcessSnapshot]]] = {}
    for snapshot in snapshots:
        for process in snapshot.processes:
            key = (process.role, process.pid)
            seen.setdefault(key, []).append((snapshot.num_requests, process))
    lives = [_life(points) for points in seen.values() if len(points) > 1]
    return sorted(lives, key=lambda life: life.first_request - life.last_request)


def _life(points: Sequence[tuple[int, ProcessSnapshot]]) -> Life:
    start, process = points[0]
    end, last = points[-1]
    warm = [(x, p) for x, p in points if x >= start + WARM_UP]
    slope = None
    if warm and end - warm[0][0] >= MIN_SPAN:
        slope = theil_sen([float(x) for x, _ in warm], [float(p.rss) for _, p in warm])
    return Life(
        process.role,
        process.pid,
        start,
        end,
        None if slope is None else slope * _PER / _MIB,
        process.rss / _MIB,
        last.rss / _MIB,
    )


def counts_of(before: ResourceSnapshot, after: ResourceSnapshot) -> list[Counts]:
    """Compare two snapshots that were taken while nothing ran."""
    rows = [
        Counts("processes", len(before.processes), len(after.processes)),
        Counts("strays", before.num_strays, after.num_strays),
        Counts("zombies", before.num_zombies, after.num_zombies),
        Counts("requests held", before.num_held, after.num_held),
        Counts("KV blocks in use, millionths", before.kv_usage_ppm, after.kv_usage_ppm),
        Counts(
            "restarts of what was not killed", *[r.num_unexpected_restarts for r in (before, after)]
        ),
        Counts("sockets in the run directory", before.num_sockets, after.num_sockets),
        Counts("files in the run directory", before.num_files, after.num_files),
    ]
    rows += [
        Counts(f"api {name}", before.gauges.get(name, 0), value)
        for name, value in sorted(after.gauges.items())
    ]
    for role in sorted({process.role for process in after.processes}):
        old = [process for process in before.processes if process.role == role]
        new = [process for process in after.processes if process.role == role]
        for what, field in (("descriptors", "num_fds"), ("threads", "num_threads")):
            most = [max((getattr(p, field) for p in side), default=0) for side in (old, new)]
            rows.append(Counts(f"{role} {what}", *most))
    return rows


def broken_bounds(tally: Tally, lives: Sequence[Life], counts: Sequence[Counts]) -> list[str]:
    """Return one line per broken bound."""
    broken = []
    if tally.num_lost:
        broken.append(f"{tally.num_lost} requests lost: {'; '.join(tally.lost)}")
    if tally.num_mismatched:
        broken.append(f"{tally.num_mismatched} mismatched: {'; '.join(tally.mismatched)}")
    broken += [
        f"{life.role} {life.pid} grows by {life.slope_mib:.2f} MiB per {_PER} requests"
        for life in lives
        if life.slope_mib is not None and life.slope_mib > MAX_SLOPE_MIB
    ]
    broken += [
        f"{row.what}: {row.before} before, {row.after} after" for row in counts if row.has_grown
    ]
    return broken


def render(outcome: Outcome) -> str:
    return "\n".join(_lines(outcome))


def _lines(outcome: Outcome) -> Iterator[str]:
    tally = outcome.tally
    yield (
        f"{tally.num_ended} requests in {outcome.seconds:.0f} s: {tally.num_right} right, "
        f"{tally.num_left} of them left by their clients, {tally.num_lost} lost, "
        f"{tally.num_mismatched} mismatched, {tally.num_deferred} deferred, "
        f"{tally.num_resent} sent again; {tally.num_kills} kills, {len(tally.stops_s)} stops"
    )
    if tally.stops_s:
        stops = sorted(tally.stops_s)
        middle = stops[len(stops) // 2]
        yield f"stopped processes were replaced after {middle:.1f} s, {stops[-1]:.1f} s at most"
    latencies = ", ".join(f"{name} {value:.1f}" for name, value in outcome.latency_ms.items())
    yield f"latency in ms: {latencies}"
    yield ""
    yield f"{'process':24}{'pid':>8}{'requests':>16}{'MiB':>16}{'MiB per 10,000':>17}"
    num_short = 0
    for life in outcome.lives:
        if life.slope_mib is None:
            num_short += 1
            continue
        span = f"{life.first_request}-{life.last_request}"
        size = f"{life.first_mib:.1f} -> {life.last_mib:.1f}"
        yield f"{life.role:24}{life.pid:>8}{span:>16}{size:>16}{life.slope_mib:>17.3f}"
    yield f"and {num_short} that were seen too briefly for a slope"
    yield ""
    yield f"{'count while nothing runs':40}{'before':>8}{'after':>8}"
    for row in outcome.counts:
        yield f"{row.what:40}{row.before:>8}{row.after:>8}"
    yield ""
    yield from outcome.broken or ["all bounds hold"]


def document(outcome: Outcome, snapshots: Sequence[ResourceSnapshot], **facts: Any) -> bytes:
    """Return everything as JSON."""
    whole = {**facts, "outcome": outcome, "snapshots": snapshots}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2)
