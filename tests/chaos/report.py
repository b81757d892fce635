"""The report of a chaos run: a table for readers, a document for programs."""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from tests.chaos.checker import Harm
from tests.chaos.faults import Fault, Phase
from tests.chaos.rounds import RoundResult

_HEAD = ("fault", "phase", "kills", "streams", "broken", "resumed")
_TAIL = (*Harm, "stall p50", "p99", "max")


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest value that is at least as great as this share of all."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(results: Sequence[RoundResult]) -> str:
    """Return one row per fault and phase, and one for all. Stalls are in seconds."""
    groups: dict[tuple[str, str], list[RoundResult]] = {}
    for result in results:
        groups.setdefault((result.fault, result.phase), []).append(result)
    order = {str(name): place for place, name in enumerate((*Fault, *Phase))}
    cells = sorted(groups, key=lambda cell: [order.get(name, -1) for name in cell])
    rows = [_row(*cell, groups[cell]) for cell in cells]
    rows.append(_row("all", "", results))
    lines = [(*_HEAD, *_TAIL), *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _row(fault: str, phase: str, results: Iterable[RoundResult]) -> tuple[str, ...]:
    members = list(results)
    numbers = [
        sum(len(result.kills) for result in members),
        sum(result.num_streams for result in members),
        sum(result.num_broken for result in members),
        sum(result.num_resumed for result in members),
        *(count(members, harm) for harm in Harm),
    ]
    stalls = [stall for result in members for stall in result.stalls_s]
    return (fault, phase, *map(str, numbers), *_seconds(stalls))


def count(results: Iterable[RoundResult], harm: Harm) -> int:
    """Count streams with this damage, each at most once per round."""
    return sum(len({v.stream for v in r.violations if v.harm is harm}) for r in results)


def _seconds(values: Sequence[float]) -> list[str]:
    quantiles = [quantile(values, share) for share in (0.5, 0.99, 1.0)]
    return ["-" if value is None else f"{value:.3f}" for value in quantiles]


def singles(results: Sequence[RoundResult]) -> Iterator[str]:
    """Yield one line per fault: stalls and waits of rounds with simultaneous deaths only."""
    for fault in Fault:
        members = [r for r in results if r.fault == fault and r.is_single and not r.missed]
        stalls = [stall for result in members for stall in result.stalls_s]
        waits = [wait for result in members for wait in result.waits_s]
        if stalls:
            yield (
                f"{fault}, {sum(len(r.kills) for r in members)} kills, all else in order: "
                f"{len(stalls)} streams stalled {' / '.join(_seconds(stalls))} s; "
                f"first event of {len(waits)} others after {' / '.join(_seconds(waits))} s"
            )


def summary(results: Sequence[RoundResult], *, num_skipped: int, seed: int) -> str:
    """Return the text below the table. Figures are medians, 99th percentiles and maxima."""
    detections = [value for result in results for value in result.detections_s]
    recoveries = [result.recovery_s for result in results if result.recovery_s is not None]
    num_unnoticed = sum(result.num_unnoticed for result in results)
    deferred = sum(result.num_deferred for result in results)
    missed = [result for result in results if result.missed]
    lines = [
        f"{len(results)} rounds in {sum(result.seconds for result in results):.0f} s, seed {seed}, "
        f"load {os.getloadavg()[0]:.1f}",
        *singles(results),
        f"{len(detections)} deaths noticed by the supervisor after "
        f"{' / '.join(_seconds(detections))} s, {num_unnoticed} never; "
        f"all processes ready again after {' / '.join(_seconds(recoveries))} s",
    ]
    if deferred:
        lines.append(f"{deferred} responses deferred a request (429 or 503)")
    if num_skipped:
        lines.append(f"{num_skipped} cells skipped: the engine has no such process")
    for result in missed:
        cell = f"{result.fault} {result.phase}"
        lines.append(f"round {result.number} ({cell}) missed its phase: {result.missed}")
    return "\n".join(lines)


def violations(results: Sequence[RoundResult]) -> str:
    """Return one line per violation, with the round that reproduces it."""
    return "\n".join(
        f"round {result.number} ({result.fault} {result.phase}): "
        f"{violation.harm} {violation.stream}: {violation.detail}"
        for result in results
        for violation in result.violations
    )


def document(results: Sequence[RoundResult], **facts: Any) -> bytes:
    """Return all results as JSON."""
    whole = {**facts, "rounds": results, "violations": sum(len(r.violations) for r in results)}
    return msgspec.json.format(msgspec.json.encode(whole), indent=2)
