"""Recurrent states outside the workers: they are read with the KV blocks, and cost no token."""

from pathlib import Path

import pytest

from protocol.api_core import EngineStats
from protocol.client import EngineClient
from protocol.lifecycle import Role
from protocol.stores.tiers import memory_directory
from scripts.testing import LOAD_TIMEOUT_S, Engine, EngineFactory, eventually
from tests.system.kills import connected
from tests.system.null_load import null_tokens
from tests.system.offload.stored_blocks import (
    MEMORY,
    NUM_PROMPTS,
    PARAMS,
    PROMPT_LEN,
    PROMPTS,
    Tokens,
    damage,
    files_in,
    stop,
    tokens_of,
)
from tests.worker.checkpoints import Architecture, build_checkpoint
from tests.worker.recurrent_models import KEY_DECAYS, KINDS, RECURRENT
from worker_proc.native.build import build, compiler

BARE = next(one for one in RECURRENT if one.name == "mamba")
"""It has no attention, and so no KV."""
SPACING = 64
"""Tokens between two states that are kept."""
KEY_LEN = 64
"""Digits of the name of a block in the first group."""

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.timeout(300),
]


def start(
    start_engine: EngineFactory, architecture: Architecture, directory: Path, *flags: str
) -> Engine:
    """Start an engine with a model of random weights, which is made by the first call."""
    if not directory.exists():
        build()
        config = architecture.config()
        config.max_position_embeddings = 2048
        config.vocab_size = 1024
        build_checkpoint(directory, config)
    settings = ("--no-api", "--num-threads", "1", "--dtype", "bfloat16", "--check-invariants")
    sizes = ("--mamba-block-size", str(SPACING), "--num-gpu-blocks-override", "400")
    return start_engine(*settings, *sizes, *flags, model=str(directory), timeout_s=LOAD_TIMEOUT_S)


def stats_of(client: EngineClient) -> EngineStats:
    return EngineStats() if client.status is None else client.status.stats


def wait_for_states(client: EngineClient, directory: Path) -> None:
    """Wait until as many blocks are written as were to be, and states are among them."""

    def are_there() -> bool:
        stats = stats_of(client)
        num_to_write = stats.states_stored + stats.kv_blocks_stored
        return len(files_in(directory)) >= num_to_write

    least = NUM_PROMPTS * PROMPT_LEN // SPACING
    eventually(lambda: stats_of(client).states_stored >= least, "states are to be written")
    eventually(are_there, "blocks are written")


def check_kill(engine: Engine, client: EngineClient, role: Role, expected: Tokens) -> None:
    """Kill a process under load: the streams go on exactly, and states are read."""
    before = stats_of(client).states_loaded if role is Role.WORKER else 0
    streams = [client.submit(*one) for one in zip(PROMPTS, PARAMS, strict=True)]
    for stream in streams:
        assert next(stream).finish_reason is None
    engine.kill(role)
    assert [stream.result(LOAD_TIMEOUT_S).token_ids for stream in streams] == expected
    eventually(lambda: stats_of(client).states_loaded > before, "states are read")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "flags"),
    [
        *((one, ()) for one in (BARE, *KINDS, *KEY_DECAYS)),
        (KINDS[0], ("--num-speculative-tokens", "3")),
        (KINDS[0], ("--swap-space-bytes", str(2**24))),
        (KINDS[0], ("--pipeline-parallel-size", "2")),
        # Its first stage has no attention, and so a layout of its own.
        (KINDS[1], ("--pipeline-parallel-size", "2")),
    ],
    ids=lambda value: getattr(value, "name", None) or "-".join(value) or "plain",
)
def test_after_kill_9_states_are_read_and_streams_continue(
    architecture: Architecture, flags: tuple[str, ...], tmp_path: Path, start_engine: EngineFactory
) -> None:
    """States are read from a disk after the next start, too; damaged ones are computed."""
    disk = tmp_path / "kv"
    stores = (*MEMORY, "--kv-offload-dir", str(disk))
    engine = start(start_engine, architecture, tmp_path / "model", *stores, *flags)
    with connected(engine) as client:
        directory = memory_directory(engine.run_dir)
        alone = tokens_of(client)
        wait_for_states(client, directory)
        wait_for_states(client, disk)
        for role in (Role.WORKER, Role.CORE):
            check_kill(engine, client, role, alone)
            assert stats_of(client).kv_tokens_loaded >= SPACING
    stop(engine)
    engine = start(start_engine, architecture, tmp_path / "model", *stores, *flags)
    with connected(engine) as client:
        assert tokens_of(client) == alone
        eventually(lambda: stats_of(client).states_loaded > 0, "states are read")
        loaded = stats_of(client)
        for place in (disk, memory_directory(engine.run_dir)):
            for file in files_in(place):
                if architecture is BARE or len(file.name) > KEY_LEN:
                    damage(file)
        engine.kill(Role.WORKER)
        assert tokens_of(client) == alone
        after = stats_of(client)
        assert after.states_loaded == loaded.states_loaded
        assert after.kv_tokens_loaded == loaded.kv_tokens_loaded


def test_the_null_model_begins_from_the_states_of_its_own_tokens(
    start_engine: EngineFactory,
) -> None:
    """It ends with an error if a state that was read is not that of the request's tokens."""
    slow = ("--null-step-ms", "2", "--null-token-ms", "0.3")  # reading pays, whatever else runs
    flags = ("--no-api", "--null-state-blocks", "12", "--mamba-block-size", str(SPACING), *slow)
    engine = start_engine(*flags, *MEMORY, "--check-invariants", model="null")
    expected = [
        null_tokens(one, params.max_tokens) for one, params in zip(PROMPTS, PARAMS, strict=True)
    ]
    with connected(engine) as client:
        assert tokens_of(client) == expected
        wait_for_states(client, memory_directory(engine.run_dir))
        for role in (Role.WORKER, Role.CORE):
            check_kill(engine, client, role, expected)
