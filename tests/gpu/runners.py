"""Runners on a GPU, with and without graphs and kernels."""

from pathlib import Path

import pytest

from protocol.config import (
    CacheConfig,
    Device,
    Dtype,
    EngineConfig,
    ModelConfig,
    NativeDecoder,
    SchedulerConfig,
    WorkerConfig,
)
from tests.worker.cuda.triton_path import set_uses_triton
from tests.worker.parity import BLOCK_SIZE
from worker_proc.model_runner import ModelRunner
from worker_proc.startup.load_runner import load_model_runner

MIN_EQUAL_OUTPUTS = 0.5
"""In bfloat16 two tokens are often equally likely; the choice may depend on the batch."""


def make_runner(directory: Path, dtype: str, **worker: object) -> ModelRunner:
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype=Dtype(dtype), device=Device.CUDA),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=400),
        scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512),
        worker=WorkerConfig(**worker),  # type: ignore[arg-type]
    )
    return load_model_runner(config, lambda phase, done, total: None)


def make_plain_runner(directory: Path) -> ModelRunner:
    """Return a runner without Triton and graphs: transformers' modules and torch's attention."""
    with pytest.MonkeyPatch.context() as patch:
        set_uses_triton(patch, False)
        return make_runner(directory, "float32")


def make_eager_runner(directory: Path) -> ModelRunner:
    return make_runner(directory, "float32", enforce_eager=True)


def make_runner_of_modules(directory: Path) -> ModelRunner:
    return make_runner(directory, "float32", native_decoder=NativeDecoder.OFF)


def make_whole_runner(directory: Path) -> ModelRunner:
    return make_runner(directory, "float32")
