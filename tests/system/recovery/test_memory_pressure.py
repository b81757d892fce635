"""No token is lost or repeated with too little memory, all scheduler options and kill -9."""

import asyncio
import tempfile

import pytest

from protocol.client import AsyncEngineClient
from protocol.sampling import SamplingParams
from tests.system.bare_engine import PROMPTS, BareEngine, collect, expected_tokens

PARAMS = SamplingParams(max_tokens=400)
PRESSURE = (
    *("--num-gpu-blocks-override", "150", "--max-model-len", "1024", "--check-invariants"),
    *("--null-step-ms", "5"),  # so that much is left to compute when the core is killed
)
SWAP = ("--swap-space-bytes", str(100 * 2**16), "--victim-choice", "cheapest")
SWITCHES = {
    "recompute": (),
    "swap": (*SWAP, "--max-steps-in-flight", "3"),
    "fair": (*SWAP, "--scheduling-policy", "fair", "--enable-kv-events"),
    "shortest": (
        *("--scheduling-policy", "shortest", "--max-num-partial-prefills", "2"),
        *("--long-prefill-token-threshold", "64", "--elastic-token-budget"),
    ),
    "priority": (*SWAP, "--scheduling-policy", "priority", "--preempt-for-priority"),
}


@pytest.mark.parametrize("flags", SWITCHES.values(), ids=SWITCHES)
def test_streams_under_memory_pressure_survive_kill_9(flags: tuple[str, ...]) -> None:
    streams: list[list[int]] = [[] for _ in PROMPTS]

    async def main(engine: BareEngine) -> None:
        async with AsyncEngineClient(engine.address) as client, asyncio.timeout(90):
            await client.wait_ready(timeout_s=20)
            pairs = zip(PROMPTS, streams, strict=True)
            work = asyncio.gather(*[collect(client, p, PARAMS, tokens) for p, tokens in pairs])
            for num_tokens, victim in ((1500, "worker_proc"), (3500, "core_proc")):
                while sum(map(len, streams)) < num_tokens:
                    await asyncio.sleep(0.005)
                engine.replace(victim)
            await work
            while client.status is None or not client.status.stats.num_preemptions:
                await asyncio.sleep(0.05)  # the last core has preempted, and reports it

    with tempfile.TemporaryDirectory() as run_dir:
        engine = BareEngine(run_dir, *PRESSURE, *flags)
        try:
            asyncio.run(main(engine))
        finally:
            engine.close()
    assert streams == expected_tokens(PROMPTS, PARAMS)
