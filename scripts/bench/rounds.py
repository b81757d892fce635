"""Repetitions of workloads on several servers, in turn."""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from scripts.bench.client import BenchError
from scripts.bench.peers import Server
from scripts.bench.report import Record, RunRecord, figure_of
from scripts.bench.workloads import WARM_UP_REQUESTS, Request, Workload, longest

_BUSY_PERCENT = 90.0

Measure = Callable[[Server, Sequence[Request]], dict[str, float]]
"""Sends requests to a server and returns the figures of `load.Run`, and perhaps more."""


class Rounds(NamedTuple):
    """How often, and with which prompts, workloads run."""

    repeats: int
    seed: int
    pause_s: float
    """Between two runs on different servers."""

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> "Rounds":
        """Take the arguments of a command."""
        return cls(arguments.repeats, arguments.seed, arguments.pause_s)

    def run(
        self,
        record: Record,
        workloads: Sequence[Workload],
        servers: Sequence[Server],
        ids: range,
        measure: Measure,
    ) -> None:
        """Run everything and add it to the record, after a part of each workload as a warm-up.

        A workload runs on all servers, in their order, before the next one begins.
        """
        record.servers |= {server.name: server.target for server in servers}
        for repeat in range(-1, self.repeats):
            for workload in workloads:
                seed = self.seed + repeat
                requests = workload.requests(seed, ids)
                if repeat < 0:
                    requests = requests[:WARM_UP_REQUESTS]
                for server in servers:
                    figures = self._measure(workload, server, requests, measure)
                    if repeat >= 0:
                        run = RunRecord(workload.name, server.name, repeat, seed, figures)
                        add(record, run)
                    if len(servers) > 1:
                        time.sleep(self.pause_s)
        busiest = max(run.figures["load_busy_percent"] for run in record.runs)
        if busiest > _BUSY_PERCENT:
            record.notes.append(
                f"A load process was busy for {busiest:.0f} % of a run, and may have been the"
                " limit: give more --load-processes."
            )

    def _measure(
        self, workload: Workload, server: Server, requests: Sequence[Request], measure: Measure
    ) -> dict[str, float]:
        try:
            return measure(server, requests)
        except BenchError as error:
            raise BenchError(f"{server.name}, {workload.name}: {error}") from error


def add(record: Record, run: RunRecord) -> None:
    """Add one run to the record, and print it."""
    record.runs.append(run)
    names = (name for name in record.shown or run.figures if name in run.figures)
    shown = ", ".join(_shown(name, run.figures[name]) for name in islice(names, 4))
    print(f"{run.workload} {run.server} {run.repeat + 1}: {shown}", file=sys.stderr, flush=True)


def _shown(name: str, value: float) -> str:
    label, decimals = figure_of(name)
    return f"{label} {value:.{decimals}f}"


def fitting(
    record: Record, workloads: Sequence[Workload], ids: range, max_model_len: int
) -> list[Workload]:
    """Return the workloads that a context of this length can hold; the others become a note."""
    kept = [item for item in workloads if longest(item, ids) <= max_model_len]
    left_out = [item.name for item in workloads if item not in kept]
    if left_out:
        names = ", ".join(left_out)
        record.notes.append(f"Left out, as max_model_len is {max_model_len}: {names}.")
    if not kept:
        raise BenchError(f"no workload fits in max_model_len {max_model_len}")
    return kept
