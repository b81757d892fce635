"""Steps that nearly reach their deadline on a busy machine: no process may be killed for it.

    python -m tests.system.long_steps --steps 10000

Many ranks of the null worker compute every step, each a process with its own deadline, while
other processes use all CPU time. Prints one line; exits with 1 if a worker or the
core was killed.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import NamedTuple

from protocol.client import AsyncEngineClient
from protocol.lifecycle import Role
from protocol.process.run_dir import client_address
from protocol.sampling import SamplingParams
from scripts.testing import Engine, EngineFactory

SHARE = 0.9
"""Duration of a step as a share of the time after which it is suspected."""
_PARAMS = SamplingParams(max_tokens=8000, ignore_eos=True)


class Outcome(NamedTuple):
    """Counters of one run."""

    num_steps: int
    """Sum over all ranks."""
    num_suspicions: int
    num_kills: int

    def __str__(self) -> str:
        return (
            f"{self.num_steps} steps at {SHARE:.0%} of their deadline: "
            f"{self.num_suspicions} suspected, {self.num_kills} killed"
        )


def run(factory: EngineFactory, *, steps: int, ranks: int, hogs: int, timeout_s: float) -> Outcome:
    """Compute `steps` steps on `ranks` ranks beside `hogs` processes that only use CPU.

    Args:
        factory: starts the engine.
        steps: number in total; a step of the engine counts once for each rank.
        ranks: number of worker processes.
        hogs: number of other processes that use a CPU all the time.
        timeout_s: time after which a step is suspected.
    """
    engine = factory(
        *("--no-api", "--tensor-parallel-size", str(ranks)),
        *("--null-step-ms", str(timeout_s * 1000 * SHARE)),
        *("--hang-timeout-s", str(timeout_s), "--first-step-timeout-s", str(timeout_s)),
        *("--hang-step-factor", "1"),
    )
    engine.ready()
    with _busy_machine(hogs):
        num_steps = asyncio.run(_compute(engine, -(-steps // ranks)))
        watched = [row for row in engine.ready().processes if row.role is not Role.SUPERVISOR]
    log = engine.log
    num_restarts = sum(row.num_restarts for row in watched)
    return Outcome(num_steps * ranks, log.count("no progress"), num_restarts)


async def _compute(engine: Engine, num_steps: int) -> int:
    """Keep the engine busy for this number of its steps."""
    async with AsyncEngineClient(client_address(engine.run_dir)) as client:
        await client.wait_ready(timeout_s=60.0)
        work = asyncio.ensure_future(_read(client))
        while client.status is None or client.status.stats.num_steps < num_steps:
            await asyncio.sleep(0.1)
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await work
        return client.status.stats.num_steps


async def _read(client: AsyncEngineClient) -> None:
    async for _ in client.submit([1, 2, 3], _PARAMS):
        pass


@contextlib.contextmanager
def _busy_machine(hogs: int) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(command) for _ in range(hogs)]
    try:
        yield
    finally:
        for hog in running:
            hog.kill()
            hog.wait()


def main() -> int:
    """Run once and print the outcome."""
    parser = argparse.ArgumentParser("python -m tests.system.long_steps", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=10_000, help="of all ranks together")
    parser.add_argument("--ranks", type=int, default=48, help="worker processes")
    parser.add_argument("--hogs", type=int, default=4, help="processes that use all the CPU")
    parser.add_argument("--timeout-s", type=float, default=0.5, help="as --hang-timeout-s")
    arguments = parser.parse_args()
    with EngineFactory() as factory:
        outcome = run(factory, **vars(arguments))
    print(outcome)
    return 1 if outcome.num_kills else 0


if __name__ == "__main__":
    sys.exit(main())
