"""Runs many seeds in several processes and adds up the results."""

import contextlib
import functools
import gc
import hashlib
import logging
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.simulation.planted import planted
from tests.simulation.replicas import run_any_seed

CHUNK = 100
"""Seeds that one process runs before it reports."""
_COLLECT_EVERY = 20


@dataclass(frozen=True)
class Batch:
    """The seeds to run, and how."""

    mode: str
    first_seed: int
    num_seeds: int
    kinds: frozenset[str]
    plant: str | None = None


@dataclass
class Tally:
    """The sum of the outcomes of some seeds of one mode."""

    num_seeds: int = 0
    num_events: int = 0
    num_streams: int = 0
    num_tokens: int = 0
    virtual_s: float = 0.0
    elapsed_s: float = 0.0
    """CPU time of all processes together."""
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[int, str]] = field(default_factory=list)
    """Seed and text."""
    trace_hash: str = ""
    """Over the hashes of all seeds, in order."""

    def add(self, other: "Tally") -> None:
        """Add the tally of the seeds that follow these."""
        self.num_seeds += other.num_seeds
        self.num_events += other.num_events
        self.num_streams += other.num_streams
        self.num_tokens += other.num_tokens
        self.virtual_s += other.virtual_s
        self.elapsed_s += other.elapsed_s
        self.counts += other.counts
        self.violations += other.violations
        both = self.trace_hash + other.trace_hash
        self.trace_hash = hashlib.sha256(both.encode()).hexdigest()


def run_chunk(batch: Batch) -> Tally:
    """Run the seeds of one batch in this process."""
    began, tally = time.perf_counter(), Tally()
    with silence(), _rare_collections(), planted(batch.plant):
        for seed in range(batch.first_seed, batch.first_seed + batch.num_seeds):
            _enter(tally, batch, seed)
            if seed % _COLLECT_EVERY == 0:
                gc.collect()
    tally.elapsed_s = time.perf_counter() - began
    return tally


def _enter(tally: Tally, batch: Batch, seed: int) -> None:
    outcome = run_any_seed(seed, batch.mode, batch.kinds)
    tally.num_seeds += 1
    tally.num_events += outcome.num_events
    tally.num_streams += outcome.num_streams
    tally.num_tokens += outcome.num_tokens
    tally.virtual_s += outcome.virtual_s
    tally.counts.update(outcome.counts)
    tally.trace_hash = hashlib.sha256((tally.trace_hash + outcome.trace_hash).encode()).hexdigest()
    if outcome.violation is not None:
        tally.violations.append((seed, outcome.violation))


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Suppress the log of the simulated processes."""
    logger = logging.getLogger("troika")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Disable automatic garbage collection: the caller collects what a run has left."""
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def run_batch(
    batch: Batch,
    jobs: int,
    deadline: float | None = None,
    on_chunk: Callable[[Tally], None] = lambda total: None,
) -> Tally:
    """Run a batch in `jobs` processes.

    Args:
        jobs: 1 runs everything in this process.
        deadline: on the monotonic clock; after it no new chunk starts.
        on_chunk: called with the sum after each chunk.
    """
    end = batch.first_seed + batch.num_seeds
    chunks = [
        Batch(batch.mode, first, min(CHUNK, end - first), batch.kinds, batch.plant)
        for first in range(batch.first_seed, end, CHUNK)
    ]
    if jobs == 1:
        return _run_here(chunks, deadline, on_chunk)
    total = Tally()
    context = multiprocessing.get_context("spawn")
    with context.Pool(jobs, _begin_job) as pool:
        for tally in pool.imap(functools.partial(_run_in_time, deadline), chunks):
            if tally.num_seeds:
                total.add(tally)
                on_chunk(total)
        pool.close()  # a process killed in the middle of a run would leave its files behind
        pool.join()
    return total


def _run_in_time(deadline: float | None, chunk: Batch) -> Tally:
    """Run a chunk, or nothing after the deadline."""
    is_late = deadline is not None and time.monotonic() >= deadline
    return Tally() if is_late else run_chunk(chunk)


def _run_here(
    chunks: list[Batch], deadline: float | None, on_chunk: Callable[[Tally], None]
) -> Tally:
    total = Tally()
    gc.freeze()
    try:
        for chunk in chunks:
            if deadline is not None and time.monotonic() >= deadline:
                break
            total.add(run_chunk(chunk))
            on_chunk(total)
    finally:
        gc.unfreeze()
    return total


def _begin_job() -> None:
    """Ignore interrupts, which the parent reports; exclude the imports from collections."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()


def default_jobs() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))
