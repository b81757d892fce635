"""Run clients against real engines, and write docs/compatibility.md.

    python -m tests.clients
    python -m tests.clients litellm openai-node-6

The exit status is 1 if a check has failed. A client that cannot be installed here is skipped.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.testing import EngineFactory
from tests.clients.catalogue import CLIENTS, Client
from tests.clients.runs import CACHE, Engines, Outcome, excerpt, run_client
from tests.clients.table import store


def main(argv: Sequence[str] | None = None) -> int:
    """Run the clients that are named, or all, and return the exit status."""
    names = [client.name for client in CLIENTS]
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(names))
    parser.add_argument("--cache", type=Path, default=CACHE, help="where clients are installed")
    arguments = parser.parse_args(argv)
    unknown = set(arguments.names) - set(names)
    if unknown:
        parser.error(f"unknown client: {', '.join(sorted(unknown))}")
    chosen = [client for client in CLIENTS if client.name in (arguments.names or names)]
    outcomes = {}
    with EngineFactory() as start_engine:
        engines = Engines(start_engine)
        for client in chosen:
            outcome, output = run_client(client, engines, arguments.cache)
            _print(client, outcome, output)
            outcomes[client.name] = outcome
            store(outcomes)
    return any(outcome.failed for outcome in outcomes.values())


def _print(client: Client, outcome: Outcome, output: str) -> None:
    if outcome.failed:
        print(excerpt(output), file=sys.stderr)
    print(f"{client.name} {' '.join(f'{k} {v}' for k, v in outcome.versions.items())}")
    for name in outcome.passed:
        print(f"  passed {name}")
    for name in outcome.failed:
        print(f"  failed {name}")
    for name, reason in outcome.skipped.items():
        print(f"  not run: {name}: {reason}")
    if outcome.reason:
        print(f"  not run: {outcome.reason}")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
