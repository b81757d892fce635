"""Draws a result as PNG files. matplotlib is an extra, imported when something is drawn."""

import importlib.util
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

from scripts.bench.client import BenchError
from scripts.bench.report import Record, figure_names, figure_of, values

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 120
_SIZE = (8.0, 4.5)


def require_matplotlib() -> None:
    """Raise a BenchError if nothing can be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--plot needs matplotlib: pip install matplotlib")


def plot(record: Record, directory: Path) -> list[Path]:
    """Write the plots of a result, and return their paths."""
    require_matplotlib()
    directory.mkdir(parents=True, exist_ok=True)
    if record.benchmark == "growth":
        return _plot_growth(record, directory)
    return [_plot_bars(record, name, directory) for name in figure_names(record)]


def _plot_growth(record: Record, directory: Path) -> list[Path]:
    """Draw one plot for each section, with a line for each part of a step."""
    paths = []
    for section in dict.fromkeys(name.partition("-")[0] for name in record.workloads):
        points = {
            int(name.partition("-")[2]): name
            for name in record.workloads
            if name.partition("-")[0] == section
        }
        figure = _figure()
        axes = figure.add_subplot(title=f"Time of a step: {record.engine.get('model', '')}")
        for part in figure_names(record):
            lines = [values(record, points[x], next(iter(record.servers)), part) for x in points]
            middle = [statistics.median(line) for line in lines]
            low = [center - min(line) for center, line in zip(middle, lines, strict=True)]
            high = [max(line) - center for center, line in zip(middle, lines, strict=True)]
            label = figure_of(part).label.partition(",")[0]
            axes.errorbar(list(points), middle, [low, high], label=label, marker="o", capsize=3)
        axes.set_xscale("symlog" if 0 in points else "log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(section)
        axes.set_ylabel("µs")
        axes.legend()
        paths.append(_save(figure, directory / f"growth-{section}.png"))
    return paths


def _plot_bars(record: Record, name: str, directory: Path) -> Path:
    """Draw the medians by workload and server, with their ranges."""
    label = figure_of(name).label
    figure = _figure()
    axes = figure.add_subplot(title=f"{record.benchmark}: {label}")
    measured = {run.workload for run in record.runs if name in run.figures}
    workloads = [workload for workload in record.workloads if workload in measured]
    width = 0.8 / max(1, len(record.servers))
    for index, server in enumerate(record.servers):
        found = [values(record, workload, server, name) or [0.0] for workload in workloads]
        middle = [statistics.median(numbers) for numbers in found]
        low = [center - min(numbers) for center, numbers in zip(middle, found, strict=True)]
        high = [max(numbers) - center for center, numbers in zip(middle, found, strict=True)]
        places = [place + index * width for place in range(len(workloads))]
        axes.bar(places, middle, width, yerr=[low, high], label=server, capsize=3)
    middle_of = (len(record.servers) - 1) * width / 2
    axes.set_xticks([place + middle_of for place in range(len(workloads))], workloads)
    axes.set_ylabel(label)
    axes.legend()
    return _save(figure, directory / f"{record.benchmark}-{name}.png")


def _figure() -> "Figure":
    from matplotlib.figure import Figure

    return Figure(figsize=_SIZE, layout="constrained")


def _save(figure: "Figure", path: Path) -> Path:
    figure.savefig(path, dpi=_DPI)
    return path
