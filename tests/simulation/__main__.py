"""Run the whole engine in virtual time, break it, and check every token of every stream.

    python -m tests.simulation --seeds 20000 --jobs 2
    python -m tests.simulation --mode progress --faults kill,drop --seeds 5000
    python -m tests.simulation --mode safety --first-seed 4711 --trace
    python -m tests.simulation --mode replicas --seeds 2000
    python -m tests.simulation --plant drop-token --seeds 300
    python -m tests.simulation --replicas 1000 --requests 1000000

The last one is another simulation, of routing and scheduling only: see tests/simulation/scale.

The exit status is 1 if a violation was found. Its seed is printed, and reproduces it.
docs/simulation.md explains the rest.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence

from tests.simulation.batch import Batch, Tally, default_jobs, run_batch, silence
from tests.simulation.plan import FAULTS, MODES
from tests.simulation.planted import PLANTS, planted
from tests.simulation.replicas import REPLICAS, run_any_seed
from tests.simulation.report import table
from tests.simulation.scale import __main__ as scale

_MAX_SHOWN = 20
_PROGRESS_S = 30.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run seeds, print the table, and return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if any(argument.partition("=")[0] == "--replicas" for argument in argv):
        return scale.main(argv)
    arguments = _parser().parse_args(argv)
    modes = list(MODES) if arguments.mode == "both" else [arguments.mode]
    if arguments.trace:
        return _trace(arguments, modes)
    began, tallies = time.monotonic(), {}
    for mode in modes:
        batch = Batch(
            mode, arguments.first_seed, arguments.seeds, arguments.faults, arguments.plant
        )
        share_s = None if arguments.limit_s is None else arguments.limit_s / len(modes)
        deadline = None if share_s is None else time.monotonic() + share_s
        with contextlib.suppress(KeyboardInterrupt):
            tallies[mode] = run_batch(batch, arguments.jobs, deadline, _Progress(mode))
    print(table(tallies, time.monotonic() - began))
    return _print_violations(tallies)


class _Progress:
    """Prints the progress of a long run now and then."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._next = time.monotonic() + _PROGRESS_S

    def __call__(self, total: Tally) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _PROGRESS_S
            text = f"{self._mode}: {total.num_seeds:,} seeds, {len(total.violations)} violations"
            print(text, file=sys.stderr, flush=True)


def _print_violations(tallies: dict[str, Tally]) -> int:
    status = 0
    for mode, tally in tallies.items():
        for seed, text in tally.violations[:_MAX_SHOWN]:
            print(f"FAILED --mode {mode} --first-seed {seed}: {text}")
        status = 1 if tally.violations else status
    return status


def _trace(arguments: argparse.Namespace, modes: list[str]) -> int:
    """Print all events of one seed."""
    status = 0
    for mode in modes:
        with silence(), planted(arguments.plant):
            outcome = run_any_seed(arguments.first_seed, mode, arguments.faults, keeps_trace=True)
        print("\n".join(outcome.lines))
        print(f"{mode} {outcome.seed}: {outcome.trace_hash} {outcome.violation or 'no violation'}")
        status = 1 if outcome.violation else status
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tests.simulation",
        description="Run the engine in virtual time under faults and compare every stream.",
    )
    parser.add_argument("--seeds", type=int, default=1000, help="number of seeds per mode")
    parser.add_argument("--first-seed", type=int, default=0, help="first of the consecutive seeds")
    parser.add_argument(
        "--mode",
        choices=(*MODES, "both", REPLICAS),
        default="both",
        help="safety: faults never end, and every stream must be correct; progress: faults end, "
        "and every request must finish; replicas: several engines, which are killed and drain",
    )
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="number of processes")
    parser.add_argument("--trace", action="store_true", help="print every event of the first seed")
    parser.add_argument(
        "--faults",
        type=_faults,
        default=frozenset(FAULTS),
        help=f"comma-separated list of {','.join(FAULTS)}",
    )
    parser.add_argument("--plant", choices=sorted(PLANTS), help="plant a bug that must be found")
    parser.add_argument("--limit-s", type=float, help="start no more seeds after this many seconds")
    return parser


def _faults(text: str) -> frozenset[str]:
    kinds = frozenset(text.split(",")) - {""}
    unknown = sorted(kinds - set(FAULTS))
    if unknown:
        raise argparse.ArgumentTypeError(
            f"unknown fault {','.join(unknown)}; choose from {','.join(FAULTS)}"
        )
    return kinds


if __name__ == "__main__":
    sys.exit(main())
