"""Simulate many replicas.

python -m tests.simulation.scale --replicas 1000 --requests 1000000
python -m tests.simulation.scale --replicas 100 --requests 100000 --policy round_robin
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence

from protocol.config import RoutingPolicy
from tests.simulation.scale.world import Plan, World


def main(argv: Sequence[str] | None = None) -> int:
    """Run one simulation and print its figures; the status is 1 if a request was lost."""
    arguments = _parser().parse_args(argv)
    plan = Plan(
        arguments.replicas,
        arguments.requests,
        RoutingPolicy(arguments.policy),
        arguments.seed,
        arguments.load,
        lost_share=arguments.lost_share,
    )
    gc.disable()  # nothing here is a cycle, and a collection looks at all replicas
    began = time.monotonic()
    tally = World(plan).run()
    print("\n".join(tally.lines()))
    print(f"{time.monotonic() - began:.0f} s")
    return 1 if tally.num_lost else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation.scale",
        description="Simulate many replicas with the real router and the real schedulers.",
    )
    parser.add_argument("--replicas", type=int, default=100, metavar="N")
    parser.add_argument("--requests", type=int, default=100_000, metavar="N")
    policies = [policy.value for policy in RoutingPolicy]
    parser.add_argument("--policy", choices=policies, default=RoutingPolicy.PREFIX_AWARE.value)
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--load", type=float, default=0.7, metavar="X", help="share of all replicas' capacity"
    )
    parser.add_argument(
        "--lost-share", type=float, default=0.1, metavar="X", help="of the replicas; 0: none dies"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
