"""Runners of small models on the CUDA path, with proofs that take little time."""

from pathlib import Path

import pytest

from protocol.config import (
    CacheConfig,
    Device,
    Dtype,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    WorkerConfig,
)
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import SHAPE
from tests.worker.cuda.interpreter import DEVICE
from worker_proc.calibration import self_check
from worker_proc.decoder import proof
from worker_proc.model_runner import ModelRunner
from worker_proc.native.structures import Rotation
from worker_proc.startup.load_runner import load_model_runner

BLOCK_SIZE, MAX_TOKENS, NUM_DRAFTS = 4, 4, 2
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
SMALL = SHAPE | {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def prove_briefly(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """Try one text, rows of one scale and the usual rotation; slow tests leave nothing out."""
    monkeypatch.setattr(self_check, "TEXT_LENGTHS", (4,))
    monkeypatch.setattr(proof, "TRIAL_SCALES", (scale,))
    monkeypatch.setattr(proof, "Rotation", [Rotation.HALVES])


def make_runner(
    directory: Path, dtype: str = "float32", draft: Path | None = None, **worker: object
) -> ModelRunner:
    config = EngineConfig(
        model=ModelConfig(
            model=str(directory),
            dtype=Dtype(dtype),
            device=Device(DEVICE.type),
            speculative_model=None if draft is None else str(draft),
        ),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=200),
        scheduler=SchedulerConfig(
            max_num_seqs=4,
            max_num_batched_tokens=64,
            num_speculative_tokens=0 if draft is None else NUM_DRAFTS,
        ),
        worker=WorkerConfig(**worker),  # type: ignore[arg-type]
    )
    return load_model_runner(config, lambda phase, done, total: None)
