"""The result of a benchmark: the JSON file, and the Markdown table made from it."""

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from scripts.bench.client import BenchError
from scripts.bench.machine import Machine
from scripts.bench.workloads import EN_DASH


class Figure(NamedTuple):
    """How a figure is shown."""

    label: str
    decimals: int


FIGURES = {
    "tokens_per_s": Figure("output tokens/s", 0),
    "requests_per_s": Figure("requests/s", 2),
    "ttft_p50_ms": Figure("TTFT p50, ms", 0),
    "ttft_p99_ms": Figure("TTFT p99, ms", 0),
    "ttft_mean_ms": Figure("TTFT mean, ms", 0),
    "hit_percent": Figure("prompt tokens that were cached, %", 1),
    "imbalance": Figure("most busy replica, tokens over the mean", 2),
    "itl_p50_ms": Figure("ITL p50, ms", 1),
    "itl_p99_ms": Figure("ITL p99, ms", 1),
    "longest_gap_p90_ms": Figure("longest gap of a stream, p90, ms", 1),
    "chat_ttft_p50_ms": Figure("chats: TTFT p50, ms", 0),
    "chat_ttft_p99_ms": Figure("chats: TTFT p99, ms", 0),
    "long_ttft_p50_ms": Figure("long prompts: TTFT p50, ms", 0),
    "long_ttft_p99_ms": Figure("long prompts: TTFT p99, ms", 0),
    "handed_over": Figure("requests handed over", 0),
    "api_us": Figure("API, µs of CPU a token", 1),
    "core_us": Figure("core, µs of CPU a token", 1),
    "core_tokens_per_s": Figure("core alone, output tokens per second of CPU", 0),
    "worker_us": Figure("worker, µs of CPU a token", 1),
    "other_us": Figure("other processes, µs of CPU a token", 1),
    "load_us": Figure("load processes, µs of CPU a token", 1),
    "load_busy_percent": Figure("busiest load process, %", 0),
    "ready_s": Figure("ready, s", 2),
    "first_token_s": Figure("first token, s", 2),
    "steps": Figure("steps", 0),
    "choice_ms": Figure("choice, ms", 2),
    "choice_cpu_ms": Figure("choice, ms of processor time", 2),
    "step_us": Figure("whole step, µs", 1),
}
"""Names of other figures are shown as they are, with one decimal."""


class RunRecord(msgspec.Struct, frozen=True):
    """One repetition of a workload on a server."""

    workload: str
    server: str
    repeat: int
    seed: int
    figures: dict[str, float]


class Profile(msgspec.Struct, frozen=True):
    """Where the steps of one kind spend their time."""

    workload: str
    kind: str
    steps: int
    parts_us: dict[str, float]
    """Microseconds a step."""


class Record(msgspec.Struct, kw_only=True):
    """Everything about one call of the tool."""

    benchmark: str
    command: list[str]
    machine: Machine
    settings: dict[str, Any]
    """The arguments of the command, with defaults."""
    engine: dict[str, Any] = {}
    """Model, dtype and other facts that the engine reports, and its flags."""
    servers: dict[str, str] = {}
    """Addresses by name."""
    peers: list[str] = []
    """Servers to which the first one is compared."""
    workloads: dict[str, str] = {}
    """Titles by name."""
    shown: list[str] = []
    """Figures of the table; empty: all."""
    notes: list[str] = []
    runs: list[RunRecord] = []
    profile: list[Profile] = []


def save(record: Record, path: Path) -> None:
    """Write the JSON file."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")


def load(path: Path) -> Record:
    """Read a JSON file; BenchError: it is not one of this tool."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except OSError as error:
        raise BenchError(f"cannot read {path}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise BenchError(f"{path} is not a result of this tool: {error}") from error


def values(record: Record, workload: str, server: str, figure: str) -> list[float]:
    """Return a figure of all repetitions, in their order."""
    runs = sorted(record.runs, key=lambda run: run.repeat)
    return [
        run.figures[figure]
        for run in runs
        if (run.workload, run.server) == (workload, server) and figure in run.figures
    ]


def ratios(record: Record, workload: str, peer: str, figure: str) -> list[float]:
    """Return the first server's figure over the peer's, for each repetition that has both."""
    by_repeat: dict[int, dict[str, float]] = {}
    for run in record.runs:
        if run.workload == workload and figure in run.figures:
            by_repeat.setdefault(run.repeat, {})[run.server] = run.figures[figure]
    ours = _servers(record)[0]
    return [
        found[ours] / found[peer]
        for _, found in sorted(by_repeat.items())
        if ours in found and found.get(peer)
    ]


def spread(numbers: Sequence[float], decimals: int) -> str:
    """Return the median, with the range if there are several."""
    if not numbers:
        return ""
    middle = f"{statistics.median(numbers):,.{decimals}f}"
    if len(numbers) == 1:
        return middle
    return f"{middle} [{min(numbers):,.{decimals}f}{EN_DASH}{max(numbers):,.{decimals}f}]"


def figure_of(name: str) -> Figure:
    """Return how a figure is shown."""
    return FIGURES.get(name, Figure(name, 1))


def figure_names(record: Record) -> list[str]:
    """Return the figures of the table, in its order."""
    found = dict.fromkeys(name for run in record.runs for name in run.figures)
    return [name for name in record.shown or found if name in found]


def table(record: Record) -> str:
    """Return what was measured as Markdown: a caption, the tables, and the notes."""
    servers = _servers(record)
    rows = _wide(record, servers[0]) if len(servers) == 1 else _tall(record, servers)
    profile = ["", *_aligned(_profile_rows(record))] if record.profile else []
    notes = [f"\n{note}" for note in record.notes]
    return "\n".join([_caption(record), "", *_aligned(rows), *profile, *notes])


def _servers(record: Record) -> list[str]:
    return list(record.servers) or list(dict.fromkeys(run.server for run in record.runs)) or [""]


def _measured(record: Record) -> list[str]:
    """Return the workloads that have figures, in their order."""
    found = {run.workload for run in record.runs}
    return [name for name in record.workloads if name in found]


def _wide(record: Record, server: str) -> list[list[str]]:
    """Return one row for each workload."""
    names = figure_names(record)
    rows = [["workload", *(figure_of(name).label for name in names)]]
    for workload in _measured(record):
        cells = [
            spread(values(record, workload, server, name), figure_of(name).decimals)
            for name in names
        ]
        rows.append([record.workloads[workload], *cells])
    return rows


def _tall(record: Record, servers: list[str]) -> list[list[str]]:
    """Return one row for each workload and figure."""
    ours = servers[0]
    rows = [["workload", "figure", *servers, *(f"{ours} / {peer}" for peer in record.peers)]]
    for workload in _measured(record):
        title = record.workloads[workload]
        for name in figure_names(record):
            label, decimals = figure_of(name)
            cells = [spread(values(record, workload, s, name), decimals) for s in servers]
            if any(cells):
                cells += [spread(ratios(record, workload, p, name), 2) for p in record.peers]
                rows.append([title, label, *cells])
                title = ""
    return rows


def _profile_rows(record: Record) -> list[list[str]]:
    """Return one row for each part of a step."""
    columns = record.profile
    names = dict.fromkeys(name for column in columns for name in column.parts_us)
    rows = [["µs a step", *(f"{column.workload}, {column.kind}" for column in columns)]]
    for name in names:
        rows.append([name, *(f"{column.parts_us.get(name, 0.0):,.1f}" for column in columns)])
    rows.append(["whole step", *(f"{sum(column.parts_us.values()):,.1f}" for column in columns)])
    return [*rows, ["steps", *(f"{column.steps:,}" for column in columns)]]


def _aligned(rows: Sequence[Sequence[str]]) -> Iterable[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for index, row in enumerate(rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield f"| {' | '.join(cells)} |"
        if index == 0:
            yield f"|{'|'.join('-' * (width + 2) for width in widths)}|"


def _caption(record: Record) -> str:
    machine = record.machine
    engine = [str(record.engine[key]) for key in ("model", "dtype") if record.engine.get(key)]
    flags = record.engine.get("flags")
    repeats = max((run.repeat for run in record.runs), default=0) + 1
    parts = [
        f"`{record.benchmark}`",
        *engine,
        *([f"flags `{' '.join(flags)}`"] if flags else []),
        f"{machine.usable_cores} cores of {machine.cpu} ({', '.join(machine.cpu_flags)})",
        *machine.gpus,
        f"load {machine.load_average[0]:g} at the start",
        f"commit {machine.commit[:10] or 'unknown'}{' with changes' * machine.is_modified}",
        f"medians [lowest{EN_DASH}highest] of {repeats}",
    ]
    return ", ".join(parts) + ":"
