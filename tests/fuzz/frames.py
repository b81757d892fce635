"""Feeds damaged messages to the readers of `tests/fuzz/targets.py`, and measures what they cost."""

import contextlib
import gc
import itertools
import logging
import multiprocessing
import os
import random
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.fuzz.faults import Fault
from tests.fuzz.targets import Feed, Target, all_targets

BLOCK = 5_000
"""Messages of one generator: any block can be repeated alone."""
MAX_GROWTH_BYTES = 8 * 2**20
"""From the end of the first block to the end of the last one."""
MAX_PEAK_BYTES = 32 * 2**20
"""In between: no message is decoded to many times its size."""
MAX_OBJECT_BYTES = 256 * 1024
"""Memory of Python objects that one block leaves behind."""
_TIMED_EVERY = 16
_COLUMNS = ("messages", "accepted", "a second", "refusal", "growth", "peak", "objects")
_HEADING = f"{'(µs, KiB)':28s}" + "".join(f"{name:>11s}" for name in _COLUMNS)
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Figures(NamedTuple):
    """What the messages to one target did."""

    name: str
    num_messages: int
    num_accepted: int
    seconds: float
    reject_ns: float
    """Processor time of a refusal, its 99th percentile."""
    growth_bytes: int
    peak_bytes: int
    object_bytes: int


def messages(target: Target, seed: int, block: int) -> Iterator[bytes]:
    """Return the messages of one block, well-formed ones first."""
    rng = random.Random(f"{seed}/{target.name}/{block}")
    return itertools.islice(
        itertools.chain(target.samples, target.mutate(target.samples, rng)), BLOCK
    )


def fuzz(name: str, seed: int, blocks: Sequence[int]) -> Figures:
    """Feed some blocks to one target; Fault: the message, and how to feed it again."""
    target = find(name)
    costs: list[int] = []
    num_accepted = 0
    began = time.perf_counter()
    with _quiet(), target.open() as feed:
        for place, block in enumerate(blocks):
            num_accepted += _feed_block(target, feed, seed, block, costs)
            if place == 0:
                gc.collect()
                first_bytes = resident_bytes()
                Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        seconds = time.perf_counter() - began
        gc.collect()
        growth, peak = resident_bytes() - first_bytes, _peak_bytes() - first_bytes
        object_bytes = _object_bytes(target, feed, seed, blocks[-1] + 1)
    costs.sort()
    reject_ns = costs[len(costs) * 99 // 100] if costs else 0
    num_messages = len(blocks) * BLOCK
    figures = Figures(
        name, num_messages, num_accepted, seconds, reject_ns, growth, peak, object_bytes
    )
    _check(figures)
    return figures


def _check(figures: Figures) -> None:
    if not 0 < figures.num_accepted < figures.num_messages:
        raise Fault(f"{figures.name}: {figures.num_accepted} messages were accepted")
    for text, num_bytes, limit in (
        ("memory has grown by", figures.growth_bytes, MAX_GROWTH_BYTES),
        ("memory was larger by", figures.peak_bytes, MAX_PEAK_BYTES),
        ("a block has left objects of", figures.object_bytes, MAX_OBJECT_BYTES),
    ):
        if num_bytes > limit:
            raise Fault(f"{figures.name}: {text} {num_bytes:,} bytes, more than {limit:,}")


def find(name: str) -> Target:
    """Return a target by its name."""
    return next(target for target in all_targets() if target.name == name)


def _feed_block(target: Target, feed: Feed, seed: int, block: int, costs: list[int]) -> int:
    """Feed one block; appends the cost of some refusals, and returns how many were accepted."""
    num_accepted, clock = 0, time.thread_time_ns
    for number, message in enumerate(messages(target, seed, block)):
        try:
            if number % _TIMED_EVERY:
                num_accepted += feed(message)
                continue
            began = clock()
            if feed(message):
                num_accepted += 1
            else:
                costs.append(clock() - began)
        except Exception as error:
            again = f'python -m tests.fuzz frames --only "{target.name}"'
            raise Fault(
                f"{target.name}: {type(error).__name__}: {error}\n"
                f"seed {seed}, block {block}, message {number}: {message.hex()}\n"
                f"{again} --bytes {message.hex()}\n"
                f"{again} --seed {seed} --first {block * BLOCK} --count {BLOCK}"
            ) from error
    return num_accepted


def _object_bytes(target: Target, feed: Feed, seed: int, block: int) -> int:
    """Return by how much the objects of Python have grown after one more block."""
    costs: list[int] = []
    tracemalloc.start()
    try:
        _feed_block(target, feed, seed, block, costs)  # fills caches and bounded stores
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        costs.clear()
        _feed_block(target, feed, seed, block, costs)
        costs.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without log lines and collections of older objects, which would cost more than all else."""
    logging.disable(logging.CRITICAL)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        logging.disable(logging.NOTSET)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def run(names: Sequence[str], seed: int, first: int, num_messages: int, jobs: int) -> list[Figures]:
    """Fuzz several targets in several processes, and print a line for each and one for all."""
    began = time.perf_counter()
    blocks = {
        target.name: range(
            first // BLOCK, -(-(first + max(1, num_messages // target.divisor)) // BLOCK)
        )
        for target in all_targets()
    }
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(jobs, len(names)), maxtasksperchild=1) as pool:
        tasks = [pool.apply_async(fuzz, (name, seed, blocks[name])) for name in names]
        found = []
        print(_HEADING)
        for task in tasks:
            found.append(figures := task.get())
            print(line(figures), flush=True)
    num_messages = sum(figures.num_messages for figures in found)
    seconds = time.perf_counter() - began
    print(f"{num_messages:,} messages in {seconds:.0f} s, {num_messages / seconds:,.0f} a second")
    return found


def line(figures: Figures) -> str:
    """Return one row of the table."""
    sizes = (figures.growth_bytes, figures.peak_bytes, figures.object_bytes)
    columns = (
        f"{figures.num_messages:,}",
        f"{figures.num_accepted:,}",
        f"{figures.num_messages / figures.seconds:,.0f}",
        f"{figures.reject_ns / 1000:.1f}",
        *(f"{size / 1024:,.0f}" for size in sizes),
    )
    return f"{figures.name:28s}" + "".join(f"{column:>11s}" for column in columns)


def feed_one(name: str, message: bytes) -> bool:
    """Feed one message to one target."""
    with find(name).open() as feed:
        return feed(message)
