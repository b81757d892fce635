"""A mixture of experts in real processes: kill -9 of worker and core changes no token."""

from pathlib import Path

import pytest
from transformers import Qwen3MoeConfig

from scripts.testing import EngineFactory
from tests.system.kills import check_tokens_after_kills
from tests.worker.checkpoints import SHAPE, build_checkpoint
from worker_proc.native.build import build, compiler


@pytest.mark.slow  # tests/worker compares the bits of mixtures after every restart
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "settings",
    [
        (),
        ("--dtype", "bfloat16", "--quantization", "w4a16"),
        ("--dtype", "bfloat16", "--quantization", "w8a8"),
    ],
    ids=lambda settings: settings[-1] if settings else "float32",
)
def test_streams_continue_after_kill_9(
    settings: tuple[str, ...], tmp_path: Path, start_engine: EngineFactory
) -> None:
    """Each request alone gets the tokens that it gets beside others, and after either death."""
    build()
    sizes = SHAPE | {"max_position_embeddings": 2048, "moe_intermediate_size": 48}
    build_checkpoint(tmp_path, Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=3))
    engine = start_engine("--no-api", "--num-threads", "1", *settings, model=str(tmp_path))
    assert check_tokens_after_kills(engine, num_prompts=3, max_tokens=200).decoder == "native"
