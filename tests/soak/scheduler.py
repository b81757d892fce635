"""Soak the scheduler: hundreds of thousands of random event sequences, in several processes.

    python -m tests.soak scheduler --sequences 200000 --jobs 2

The events are those of `tests/core/events.py` and the checks those of `tests/core/machine.py`; a
seeded generator draws them, several times faster than hypothesis would. A failed sequence is
printed with its seed and can be repeated alone: `--first-seed N --sequences 1`.
"""

import argparse
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.core.events import EVENT_NAMES, EVENTS, OPTIONS, draw, make_options
from tests.core.machine import Machine

MAX_DEPTH = 4
BATCH = 500
"""Sequences that a process runs before it reports."""
TIME_LIMIT_S = 60
"""For one sequence, which takes milliseconds: an endless loop fails too."""


class SequenceFailed(AssertionError):
    """A sequence broke an invariant; the text has the traceback, the events and the seed."""


def run_sequence(seed: int, num_events: int, depth: int | None = None) -> Machine:
    """Draw options and events from a seed, apply them, and run to the end.

    Raises:
        SequenceFailed: an invariant was broken.
    """
    rng = random.Random(seed)
    chosen = draw(OPTIONS, rng.choice)
    options = make_options(chosen, depth or rng.randint(1, MAX_DEPTH))
    history = [str(options)]
    try:
        machine = Machine(options, has_store=chosen["has_store"])
        for _ in range(num_events):
            event = rng.choice(EVENT_NAMES)
            drawn = draw(EVENTS[event][1], rng.choice)
            history.append(f"{event} {drawn}")
            machine.apply(event, **drawn)
        machine.finish()
    except Exception as error:
        text = "\n".join([traceback.format_exc(), *history, f"seed {seed}"])
        raise SequenceFailed(text) from error
    return machine


def _on_alarm(*_: object) -> None:
    raise TimeoutError(f"one sequence takes more than {TIME_LIMIT_S} s")


def run_batch(seeds: range, num_events: int) -> Counter[str]:
    """Run a sequence for each seed and return the sums of their counters."""
    counts: Counter[str] = Counter()
    signal.signal(signal.SIGALRM, _on_alarm)
    for seed in seeds:
        signal.alarm(TIME_LIMIT_S)
        machine = run_sequence(seed, num_events)
        scheduler = machine.scheduler
        counts["sequences"] += 1
        counts["steps"] += machine.num_steps
        counts["requests"] += machine.num_requests
        counts["tokens"] += scheduler.num_scheduled_tokens
        counts["preemptions"] += scheduler.num_preemptions
        counts["swaps"] += scheduler.swapper.num_swapped_out
        counts["loads"] += machine.num_loads
        counts["loads from another machine"] += machine.num_remote_loads
        counts["states from another machine"] += machine.num_remote_states_loaded
    signal.alarm(0)
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Run the soak; returns 1 if a sequence failed."""
    parser = argparse.ArgumentParser(
        "python -m tests.soak scheduler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--sequences", type=int, default=200_000)
    parser.add_argument("--events", type=int, default=30, help="events per sequence")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--first-seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    first, end = arguments.first_seed, arguments.first_seed + arguments.sequences
    batches = [range(start, min(start + BATCH, end)) for start in range(first, end, BATCH)]
    started = time.monotonic()
    total: Counter[str] = Counter()
    with ProcessPoolExecutor(arguments.jobs) as pool:
        try:
            for counts in pool.map(partial(run_batch, num_events=arguments.events), batches):
                total += counts
        except SequenceFailed as failure:
            pool.shutdown(cancel_futures=True)
            print(failure)
            return 1
    figures = ", ".join(f"{count:,} {name}" for name, count in total.items())
    print(f"{figures} in {time.monotonic() - started:.0f} s")
    return 0
