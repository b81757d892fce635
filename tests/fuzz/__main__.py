"""Feed random and damaged input to every decoder, and to the HTTP server of a real engine.

    python -m tests.fuzz frames --count 1000000
    python -m tests.fuzz frames --only "client to core" --seed 7
    python -m tests.fuzz frames --only "client to core" --bytes 93a7436f6e6e656374cd04d200
    python -m tests.fuzz http --count 100000
    python -m tests.fuzz http --first 4711 --count 1 --show

The exit status is 1 after a fault; what was sent is printed, and how to send it again.
"""

import argparse
import math
import os
import sys
from collections.abc import Sequence

from tests.fuzz import frames, http
from tests.fuzz.faults import Fault
from tests.fuzz.targets import all_targets


def main(argv: Sequence[str] | None = None) -> int:
    """Run and return the exit status."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command == "http":
            http.run(
                arguments.seed,
                arguments.first,
                arguments.count,
                limit_s=arguments.limit_s,
                show=arguments.show,
            )
        elif arguments.bytes is not None:
            for name in arguments.only or []:
                print(
                    name, "accepts it" if frames.feed_one(name, arguments.bytes) else "refuses it"
                )
        else:
            names = arguments.only or [target.name for target in all_targets()]
            frames.run(names, arguments.seed, arguments.first, arguments.count, arguments.jobs)
    except Fault as fault:
        print(f"FAILED {fault}")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m tests.fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    of_frames = commands.add_parser("frames", help="messages between processes, in this process")
    of_http = commands.add_parser("http", help="requests to an engine with the null model")
    for command in (of_frames, of_http):
        command.add_argument("--count", type=int, default=100_000, help="for each decoder")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--first", type=int, default=0, help="number of the first one")
    names = [target.name for target in all_targets()]
    of_frames.add_argument(
        "--only", action="append", choices=names, help="a decoder; several times"
    )
    of_frames.add_argument("--bytes", type=bytes.fromhex, help="feed these, as hexadecimal digits")
    of_frames.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    of_http.add_argument(
        "--limit-s", type=float, default=math.inf, help="send no more after this many seconds"
    )
    of_http.add_argument("--show", action="store_true", help="print requests and responses")
    return parser


if __name__ == "__main__":
    sys.exit(main())
