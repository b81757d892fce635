"""Quantized checkpoints in real processes: kill -9 of worker and core changes no token."""

from pathlib import Path

import pytest
from transformers import LlamaConfig

from scripts.testing import EngineFactory
from tests.system.kills import check_tokens_after_kills
from tests.worker.quantization.bitsandbytes_layouts import bitsandbytes_int8, bitsandbytes_table
from tests.worker.quantization.integer_layouts import gptq, int_quantized
from tests.worker.quantization.layouts import WIDE, Layout
from tests.worker.quantization.quantized_checkpoints import write_quantized
from worker_proc.native.build import build, compiler


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "layout",
    [
        gptq(4, 64, is_symmetric=False, has_order=True),
        int_quantized(codes_rows=True),
        bitsandbytes_int8(),
        bitsandbytes_table("nf4", is_nested=True),
    ],
    ids=lambda layout: layout.name,
)
def test_streams_continue_after_kill_9(
    layout: Layout, tmp_path: Path, start_engine: EngineFactory
) -> None:
    """Each request alone gets the tokens that it gets beside others, and after either death."""
    build()
    write_quantized(tmp_path, layout, LlamaConfig(**WIDE | {"max_position_embeddings": 2048}))
    settings = ("--no-api", "--num-threads", "1", "--dtype", "bfloat16")
    engine = start_engine(*settings, model=str(tmp_path))
    facts = check_tokens_after_kills(engine)
    assert facts.decoder == "native"
    assert facts.quantization == layout.description
