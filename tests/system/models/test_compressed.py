"""Attention over compressed entries in real processes: kill -9 of worker and core changes no token.

Entries are made of stored rows of several tokens, so that streams are cut within groups.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from protocol.lifecycle import Role
from protocol.stores.tiers import memory_directory
from scripts.testing import LOAD_TIMEOUT_S, Engine, EngineFactory, eventually
from tests.chaos.__main__ import main
from tests.chaos.faults import PARTS
from tests.system.kills import build_model, check_tokens_after_kills, connected
from tests.system.offload.stored_blocks import (
    MEMORY,
    NUM_PROMPTS,
    PROMPT_LEN,
    damage,
    files_in,
    num_loaded,
    stop,
    tokens_of,
    tokens_over_kill,
    wait_for_files,
)
from tests.worker.checkpoints import build_checkpoint
from tests.worker.compressed_models import DEEPSEEK_V4
from tests.worker.recurrent_models import build_with_tokenizer
from worker_proc.native.build import build, compiler

DRAFTS = ("--num-speculative-tokens", "3", "--no-adaptive-speculation")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("more", [(), DRAFTS], ids=["plain", "drafts"])
def test_streams_continue_after_kill_9(
    more: Sequence[str], tmp_path: Path, start_engine: EngineFactory
) -> None:
    settings = ("--no-api", "--num-threads", "1", "--dtype", "bfloat16")
    engine = start_engine(*settings, *more, model=build_model(tmp_path, DEEPSEEK_V4))
    facts = check_tokens_after_kills(engine, num_prompts=2, max_tokens=80)
    assert bool(facts.speculation) == bool(more)


@pytest.mark.timeout(600)
def test_after_kill_9_blocks_of_all_groups_are_read(
    tmp_path: Path, start_engine: EngineFactory
) -> None:
    """Those of entries are, and of the rows that a hit's end reaches; the next start reads them."""
    config = DEEPSEEK_V4.config()
    config.max_position_embeddings, config.vocab_size = 1024, 1024
    build_checkpoint(tmp_path / "model", config)
    disk = tmp_path / "kv"
    settings = ("--no-api", "--num-threads", "1", "--dtype", "bfloat16", "--check-invariants")
    stores = (*MEMORY, "--kv-offload-dir", str(disk), "--num-gpu-blocks-override", "600")

    def start() -> Engine:
        model = str(tmp_path / "model")
        return start_engine(*settings, *stores, model=model, timeout_s=LOAD_TIMEOUT_S)

    engine = start()
    with connected(engine) as client:
        alone = tokens_of(client)
        for directory in (memory_directory(engine.run_dir), disk):
            wait_for_files(directory, NUM_PROMPTS * (PROMPT_LEN // 16))
        for role in (Role.WORKER, Role.CORE):
            tokens, _ = tokens_over_kill(engine, client, role, 0)
            assert tokens == alone
            eventually(lambda: num_loaded(client) >= PROMPT_LEN, "blocks are read")
    stop(engine)
    engine = start()
    with connected(engine) as client:
        assert tokens_of(client) == alone
        assert num_loaded(client) >= PROMPT_LEN
        for file in files_in(disk):
            damage(file)
        for file in files_in(memory_directory(engine.run_dir)):
            damage(file)
        before = num_loaded(client)
        engine.kill(Role.WORKER)
        assert tokens_of(client) == alone
        assert num_loaded(client) == before


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
def test_kills_in_every_phase_change_no_stream(part: str, tmp_path: Path) -> None:
    """The worker, the core or both are killed."""
    build()
    build_with_tokenizer(tmp_path / "model", DEEPSEEK_V4)
    cells = ("--matrix", "--faults", "worker,core,both", "--phases", ",".join(PARTS[part]))
    # A text of 1,024 tokens takes more of its blocks than of those of other models.
    settings = ("--num-threads", "1", "--num-gpu-blocks-override", "130")
    assert main(["--model", str(tmp_path / "model"), *cells, "--", *settings]) == 0
