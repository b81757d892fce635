"""One request kills every worker that computes it: its client alone gets an error, in seconds."""

import asyncio
import time

import pytest

from protocol.client import AsyncEngineClient
from protocol.client.errors import RequestQuarantined
from protocol.lifecycle import Role
from protocol.process import failpoints
from protocol.process.run_dir import client_address
from protocol.sampling import SamplingParams
from scripts.testing import TIMEOUT_S, EngineFactory
from tests.system.bare_engine import collect, expected_tokens

NUM_STREAMS = 32
CULPRIT = 17
PROMPTS = [[5, 6, 7, n] for n in range(NUM_STREAMS)]
POISON = [failpoints.POISON_TOKEN_ID, 6, 7]
PARAMS = SamplingParams(max_tokens=200)
ANSWERED_WITHIN_S = 30.0
MAX_DEATHS = 7
FLAGS = ("--no-api", "--null-step-ms", "1")
QUICK = ("--hang-timeout-s", "0.5", "--first-step-timeout-s", "0.5", "--hang-step-factor", "2")
"""For deaths that are detected by a step's deadline; in other cases no deadline may pass."""


@pytest.mark.parametrize(
    ("harm", "num_ranks"),
    [
        ("segv@*", 1),
        ("exc@*", 1),
        ("hold:30000@*", 1),
        *(pytest.param(harm, 2, marks=pytest.mark.slow) for harm in ("segv@*", "exc@*")),
        pytest.param("hold:30000@*", 4, marks=pytest.mark.slow),
    ],
)
def test_only_the_poison_request_is_refused_and_all_others_are_exact(
    start_engine: EngineFactory, harm: str, num_ranks: int
) -> None:
    """All ranks of a group die, or hang, of it in the same step: it counts as one death."""
    start_engine.environ[failpoints.VARIABLE] = f"worker.poison={harm}"
    ranks = ("--tensor-parallel-size", str(num_ranks))
    engine = start_engine(*FLAGS, *ranks, *QUICK * harm.startswith("hold"))
    engine.ready()
    streams: list[list[int]] = [[] for _ in PROMPTS]
    answered_after_s: list[float] = []

    async def poison(client: AsyncEngineClient) -> None:
        started_at = time.monotonic()
        with pytest.raises(RequestQuarantined):
            await collect(client, POISON, PARAMS, [])
        answered_after_s.append(time.monotonic() - started_at)

    async def main() -> None:
        address = client_address(engine.run_dir)
        async with AsyncEngineClient(address) as client, asyncio.timeout(90):
            await client.wait_ready(timeout_s=TIMEOUT_S)
            work = [collect(client, PROMPTS[n], PARAMS, streams[n]) for n in range(NUM_STREAMS)]
            work.insert(CULPRIT, poison(client))
            await asyncio.gather(*work)
            num_restarts = engine.row(Role.WORKER).num_restarts
            assert num_restarts <= MAX_DEATHS
            with pytest.raises(RequestQuarantined):
                await collect(client, POISON, PARAMS, [])
            assert engine.row(Role.WORKER).num_restarts == num_restarts, "refused at submission"

    asyncio.run(main())
    assert streams == expected_tokens(PROMPTS, PARAMS)
    assert answered_after_s[0] <= ANSWERED_WITHIN_S
