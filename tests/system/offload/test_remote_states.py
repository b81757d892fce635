"""A state of another machine that is larger than a frame: it comes in parts, or is computed.

Each engine here stands for a machine: it has a run directory and stores of its own.
"""

import asyncio
import os
import signal
from functools import partial
from pathlib import Path

import pytest

from protocol.client import AsyncEngineClient, ReplicatedClient, ReplicatedOptions
from protocol.client import moving as module
from protocol.config import RoutingPolicy
from protocol.lifecycle import Role
from protocol.sampling import SamplingParams
from protocol.transport.channel import MAX_FRAME_BYTES
from protocol.transport.curve import read_client_keys
from scripts.testing import LOAD_TIMEOUT_S, TIMEOUT_S, Engine, EngineFactory
from tests.system.machines.proxy import Proxy
from tests.system.machines.replicated_streams import until_serving
from tests.system.offload import test_offload_states as states
from tests.system.offload.machine import Machine, num_remote
from tests.system.offload.stored_blocks import PROMPT_LEN, PROMPTS, files_in, tokens_left
from tests.worker.checkpoints import Architecture
from tests.worker.recurrent_models import KINDS
from worker_proc.native.build import compiler

SPACING = 160
NUM_STATES = PROMPT_LEN // SPACING + 1
"""Of a prompt: one at its end, too."""
PARAMS = SamplingParams(max_tokens=60, temperature=0.9, seed=3, ignore_eos=True)
PROMPT = PROMPTS[0]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.timeout(600),
]


def _large_states() -> object:
    config = KINDS[0].config()
    config.linear_num_value_heads, config.linear_key_head_dim = 32, 256
    config.linear_value_head_dim = 640
    return config


LARGE = Architecture("large states", _large_states)  # type: ignore[arg-type]


def _begin(directory: Path, start_engine: EngineFactory, *flags: str) -> Engine:
    return states.start(start_engine, LARGE, directory, *flags)


def large_files(machine: Machine) -> list[Path]:
    return [path for path in files_in(machine.files) if path.stat().st_size > MAX_FRAME_BYTES]


@pytest.fixture
def machines(start_engine: EngineFactory, keys: Path, tmp_path: Path) -> list[Machine]:
    """The one that is lost, and the other one."""
    sizes = ("--mamba-block-size", str(SPACING), "--kv-cache-memory-bytes", str(2**28))
    made = []
    for _ in range(2):
        made.append(Machine(start_engine, keys, *sizes, begin=partial(_begin, tmp_path / "model")))
        made[-1].engine.ready()
    return made


@pytest.mark.parametrize("dies", [False, True])
def test_a_request_brings_a_state_that_is_larger_than_a_frame(
    dies: bool, machines: list[Machine], keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`dies`: so does the source, amid the state; the request is computed, and waits briefly."""
    lost, kept = machines

    async def play() -> None:
        proxy = Proxy(lost.kv_port)
        addresses, made = [lost.address, kept.address], read_client_keys(keys)
        policy = RoutingPolicy.ROUND_ROBIN
        async with (
            proxy.listening() as address,
            ReplicatedClient(addresses, ReplicatedOptions(policy=policy), keys=made) as client,
        ):
            await until_serving(client, LOAD_TIMEOUT_S)
            monkeypatch.setattr(module, "blocks_for", lambda *_: address)
            expected = await tokens_left(client.submit(PROMPT, PARAMS))
            async with asyncio.timeout(TIMEOUT_S):
                while len(large_files(lost)) < NUM_STATES:
                    await asyncio.sleep(0.01)
            await tokens_left(client.submit(PROMPTS[1], PARAMS))  # at the other one
            stream = client.submit(PROMPT, PARAMS)
            first = (await anext(stream)).token_ids
            assert client.clients[0].num_open_requests == 1
            if dies:
                proxy.cut_after(MAX_FRAME_BYTES // 2)
            server = lost.engine.pid(Role.BLOCK_SERVER)
            lost.lose_engine()
            if dies:
                await _kill_amid(proxy, server)
            assert first + await tokens_left(stream) == expected
            assert client.num_moved == 1
            await _check_loaded(client.clients[1], 0 if dies else PROMPT_LEN - 16)
            if not dies:
                assert proxy.num_bytes > MAX_FRAME_BYTES
        assert kept.engine.row(Role.WORKER).num_restarts == 0

    asyncio.run(play())


async def _kill_amid(proxy: Proxy, server: int) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not proxy.is_cut:
            await asyncio.sleep(0.005)
    os.kill(server, signal.SIGKILL)
    proxy.mend()


async def _check_loaded(client: AsyncEngineClient, num_tokens: int) -> None:
    """Wait for the status that counts what came from the other machine."""
    async with asyncio.timeout(TIMEOUT_S):
        while num_remote(client) < num_tokens:
            await asyncio.sleep(0.01)
    assert client.status is not None
    assert client.status.stats.states_loaded == bool(num_tokens)
