"""The table of a simulation."""

from collections import Counter
from collections.abc import Mapping

from tests.simulation.batch import Tally
from tests.simulation.oracle import VERDICTS

_OTHER = "other"


def verdicts(tally: Tally) -> Counter[str]:
    """Count violations by kind: one of `VERDICTS`, or "other"."""
    kinds = (text.split(":")[0] for _, text in tally.violations)
    return Counter(kind if kind in VERDICTS else _OTHER for kind in kinds)


def table(tallies: Mapping[str, Tally], wall_s: float) -> str:
    """Return one line per mode, and the counts of all injected faults."""
    names = ("mode", "seeds", "events", "streams", "tokens", *VERDICTS, _OTHER, "virtual h")
    rows: list[tuple[str, ...]] = [names]
    for mode, tally in tallies.items():
        found = verdicts(tally)
        numbers = (tally.num_seeds, tally.num_events, tally.num_streams, tally.num_tokens)
        counts = (found[name] for name in (*VERDICTS, _OTHER))
        hours = f"{tally.virtual_s / 3600:.1f}"
        rows.append((mode, *(f"{number:,}" for number in (*numbers, *counts)), hours))
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    total = sum(tally.num_seeds for tally in tallies.values())
    busy = sum(tally.elapsed_s for tally in tallies.values())
    each_ms = 1000 * busy / max(total, 1)
    lines.append(f"{total / max(wall_s, 1e-9):,.0f} seeds/s, {each_ms:.1f} ms each")
    lines += [f"{mode}: trace {tally.trace_hash}" for mode, tally in tallies.items()]
    counts_by_kind: Counter[str] = Counter()
    for tally in tallies.values():
        counts_by_kind += tally.counts
    by_title: dict[str, list[str]] = {"kills": [], "other faults": [], "requests": []}
    for kind, count in sorted(counts_by_kind.items()):
        is_kill = kind.startswith("kill")
        is_feature = kind.startswith(("grammar", "vector", "adapter"))
        title = "kills" if is_kill else "requests" if is_feature else "other faults"
        by_title[title].append(f"{kind.removeprefix('kill ')} {count:,}")
    lines += [f"{title}: {', '.join(found) or 'none'}" for title, found in by_title.items()]
    return "\n".join(lines)
