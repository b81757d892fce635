"""The layout of blocks in stores differs wherever the bytes of KV or states mean something else."""

from pathlib import Path
from typing import Any

import msgspec
import torch

from protocol.config import CacheConfig, EngineConfig
from protocol.model_facts import ModelFacts
from tests.worker.bitwise import engine_config
from tests.worker.checkpoints import build_checkpoint
from tests.worker.recurrent_models import RECURRENT
from worker_proc.kv.kv_groups import Place
from worker_proc.model_runner import ModelRunner
from worker_proc.offload.layout import with_layout
from worker_proc.startup.load_runner import load_model_runner

BY_NAME = {architecture.name: architecture for architecture in RECURRENT}


def load(directory: Path, dtype: str = "float32", **cache: Any) -> ModelRunner:
    config = engine_config(directory, dtype, 1)
    settings = {"block_size": 16, "num_gpu_blocks_override": 64, "kv_offload_bytes": 2**20} | cache
    return load_model_runner(
        msgspec.structs.replace(config, cache=CacheConfig(**settings)), lambda *_: None
    )


def test_states_and_kv_of_another_kind_have_another_layout(tmp_path: Path) -> None:
    """Another model, another number type, and blocks that end at other positions."""
    for name in ("qwen3_next", "mamba"):
        build_checkpoint(tmp_path / name, BY_NAME[name].config())
    config = BY_NAME["qwen3_next"].config()
    config.linear_value_head_dim *= 2
    build_checkpoint(tmp_path / "wide", config)
    one = load(tmp_path / "qwen3_next")
    assert one.facts.kv_layout
    assert one.facts.kv_layout == load(tmp_path / "qwen3_next").facts.kv_layout
    others = [
        load(tmp_path / "wide"),
        load(tmp_path / "mamba"),
        load(tmp_path / "qwen3_next", "bfloat16"),
        load(tmp_path / "qwen3_next", block_size=32),
    ]
    layouts = {one.facts.kv_layout, *(other.facts.kv_layout for other in others)}
    assert len(layouts) == 1 + len(others)
    assert load(tmp_path / "qwen3_next", kv_offload_bytes=0).facts.kv_layout == ""


def test_the_number_of_state_blocks_and_their_spacing_change_no_layout(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, BY_NAME["qwen3_next"].config())
    layouts = {
        load(tmp_path, num_state_blocks_override=number, mamba_block_size=spacing).facts.kv_layout
        for number, spacing in ((5, 32), (9, 64))
    }
    assert len(layouts) == 1


def test_other_places_in_a_block_are_another_layout() -> None:
    """Layers share one tensor, whose shape does not show where each keeps its rows."""
    config = EngineConfig(cache=CacheConfig(kv_offload_bytes=2**20))
    facts, tensors = ModelFacts("m", 1000, 4096, 16, 512, []), [torch.empty(4, 96)]
    layouts = [
        with_layout(facts, config, tensors, "native", places=places).kv_layout
        for places in (
            (),
            (Place(1, 0, 0), Place(1, 32, 16)),
            (Place(1, 0, 0), Place(1, 48, 16)),
            (Place(1, 0, 0), Place(2, 32, 16)),
            (Place(1, 0, 0), Place(1, 32, 48)),
        )
    ]
    assert len(set(layouts)) == len(layouts)
