"""Steps that take nearly as long as they may, on a machine that is busy: is anybody killed for it?

    python -m tests.system.long_steps --steps 10000

Many ranks of the null worker compute every step, each a process with a deadline of its own, while
other processes take all the CPU that there is. Prints one line; exits with 1 if a worker or the
core was killed.
"""

import argparse
import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import NamedTuple

from protocol.channel import client_address
from protocol.client import AsyncEngineClient
from protocol.lifecycle import Role
from protocol.sampling import SamplingParams
from tests.system.conftest import Engine, EngineFactory

SHARE = 0.9
"""Of the time after which it is suspected, that a step takes."""
_PARAMS = SamplingParams(max_tokens=8000, ignore_eos=True)


class Outcome(NamedTuple):
    """What has become of the workers."""

    num_steps: int
    """Of all ranks together."""
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
        steps: in all; each step of the engine is one on each rank.
        ranks: of the worker.
        hogs: other processes that never rest.
        timeout_s: after which a step is suspected.
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
    """Keep the engine busy for so many of its steps."""
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
    """Run once and print what came of it."""
    parser = argparse.ArgumentParser("python -m tests.system.long_steps", allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=10_000, help="of all ranks together")
    parser.add_argument("--ranks", type=int, default=48, help="worker processes")
    parser.add_argument("--hogs", type=int, default=4, help="processes that use all the CPU")
    parser.add_argument("--timeout-s", type=float, default=0.5, help="as --hang-timeout-s")
    arguments = parser.parse_args()
    base = tempfile.mkdtemp(prefix="troika-test-")
    factory = EngineFactory(base)
    try:
        outcome = run(factory, **vars(arguments))
    finally:
        factory.close()
        shutil.rmtree(base)
    print(outcome)
    return 1 if outcome.num_kills else 0


if __name__ == "__main__":
    sys.exit(main())
