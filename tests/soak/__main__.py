"""Soak an engine with short requests, kills, stops and disconnects, and look for leaks.

`python -m tests.soak scheduler` soaks the scheduler alone instead (tests/soak/scheduler.py), and
`python -m tests.soak journal` the journal with abandoned streams (tests/soak/journal.py).

The engine has the null model, so every token can be checked. Workers and cores are killed, and
stopped with SIGSTOP, in turn at random moments; clients disconnect in the middle of their streams.
A tenth of the requests after the warm-up and the last fifth run without faults, so that their
latencies can be compared and the last core and worker live long enough to be measured.

The exit status is 1 if a request was lost or wrong; if the resident memory of a process that lives
through 10,000 requests grows by more than 1 MiB per 10,000 (the median of all slopes between two
snapshots, after its first 5,000); or if descriptors, threads, processes, zombies, sockets, held
requests or KV blocks are more at the end than after the warm-up.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from tests.chaos.engine import EngineFailed
from tests.soak.report import document, render
from tests.soak.session import Plan, Session

NUM_REQUESTS = 86_400
NUM_KILLS = 300
NUM_STOPS = 100
NUM_DISCONNECTS = 2_000
_NUM_WARM_UP = 2_000
_FIRST_QUIET_SHARE, _LAST_QUIET_SHARE = 0.1, 0.2
_SAMPLES = 100


def main(argv: Sequence[str] | None = None) -> int:
    """Run a soak and print its report. Returns the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["scheduler"]:
        from tests.soak import scheduler  # it needs the tests of the core

        return scheduler.main(argv[1:])
    if argv[:1] == ["journal"]:
        from tests.soak import journal

        return journal.main(argv[1:])
    arguments = _parser().parse_args(argv)
    plan = _plan(arguments)
    with tempfile.TemporaryDirectory(prefix="soak-") as base:
        session = Session(plan, Path(base), arguments.keep)
        outcome = None
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                outcome = runner.run(session.run())
        except* EngineFailed as group:
            print("\n".join(map(str, group.exceptions)), file=sys.stderr)
        if outcome is None:
            return 1
    print(render(outcome))
    if arguments.json is not None:
        arguments.json.write_bytes(
            document(outcome, session.snapshots, plan=msgspec.structs.asdict(plan))
        )
    return 1 if outcome.broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tests.soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    numbers = {
        "--requests": (NUM_REQUESTS, "number of requests"),
        "--kills": (NUM_KILLS, "number of SIGKILLs"),
        "--stops": (NUM_STOPS, "number of SIGSTOPs"),
        "--disconnects": (NUM_DISCONNECTS, "number of requests whose client disconnects"),
        "--concurrency": (32, "number of clients"),
        "--embedded-share": (0.25, "share of the requests that uses the embedding client"),
        "--seed": (1, "seed of all random numbers"),
    }
    for flag, (default, text) in numbers.items():
        parser.add_argument(
            flag, type=type(default), default=default, help=f"{text}; default: {default}"
        )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results to this file")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="copy the engine's log there")
    parser.add_argument("engine_flags", nargs="*", metavar="-- FLAGS", help="supervisor flags")
    return parser


def _plan(arguments: argparse.Namespace) -> Plan:
    num_requests = max(10, arguments.requests)
    return Plan(
        num_requests=num_requests,
        num_kills=arguments.kills,
        num_stops=arguments.stops,
        num_disconnects=arguments.disconnects,
        concurrency=arguments.concurrency,
        embedded_share=arguments.embedded_share,
        num_warm_up=min(_NUM_WARM_UP, num_requests // 4),
        num_first_quiet=int(num_requests * _FIRST_QUIET_SHARE),
        num_last_quiet=int(num_requests * _LAST_QUIET_SHARE),
        sample_every=max(10, num_requests // _SAMPLES),
        seed=arguments.seed,
        flags=[
            *("--log-level", "warning"),
            *("--num-gpu-blocks-override", "1024", "--standby-workers", "1"),
            *(
                "--first-step-timeout-s",
                "5",
            ),  # a process stopped in its first step is detected soon, too
            *arguments.engine_flags,
        ],
    )


if __name__ == "__main__":
    sys.exit(main())
