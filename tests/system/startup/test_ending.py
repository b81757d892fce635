"""An engine that is asked to end finishes its open requests, even if a process dies meanwhile."""

import asyncio
import os
import signal

import pytest

from protocol.client import AsyncEngineClient
from protocol.lifecycle import Role
from protocol.process.run_dir import client_address
from protocol.sampling import SamplingParams
from scripts.testing import TIMEOUT_S, Engine, EngineFactory
from tests.system.null_load import null_tokens

PROMPT = [5, 6, 7]
NUM_TOKENS = 400


@pytest.mark.parametrize("victim", [Role.CORE, Role.WORKER])
def test_an_embedded_engine_finishes_although_a_process_is_killed(
    start_engine: EngineFactory, victim: Role
) -> None:
    """Open requests are in their client's ledger; a restarted core gets them from there.

    With this log level a start prints nothing, and deaths are warnings.
    """
    engine = start_engine("--no-api", "--null-step-ms", "5", "--log-level", "warning")
    engine.ready()
    assert asyncio.run(_read_while_it_ends(engine, victim)) == null_tokens(PROMPT, NUM_TOKENS)
    assert engine.process.wait(TIMEOUT_S) == 0
    lines = engine.log.splitlines()
    assert any(f"{victim} died of SIGKILL" in line for line in lines)
    assert [line for line in lines if "WARNING" not in line] == []


async def _read_while_it_ends(engine: Engine, victim: Role) -> list[int]:
    pid = engine.pid(victim)
    token_ids: list[int] = []
    async with AsyncEngineClient(client_address(engine.run_dir)) as client:
        await client.wait_ready(TIMEOUT_S)
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
        async for output in client.submit(PROMPT, params):
            if not token_ids:
                engine.process.send_signal(signal.SIGTERM)
                os.kill(pid, signal.SIGKILL)
            token_ids += output.token_ids
    return token_ids
