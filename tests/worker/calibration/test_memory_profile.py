"""The steps that are computed to find out what memory the KV cache leaves to steps."""

from pathlib import Path

import pytest
import torch
from transformers import MistralConfig

from protocol.config import CacheConfig, Device, EngineConfig, ModelConfig, SchedulerConfig
from tests.worker.checkpoints import SHAPE, VOCAB_SIZE, WINDOW, build_checkpoint
from worker_proc.calibration import memory
from worker_proc.inputs import StepInputs
from worker_proc.sampling.sampler import Sampler
from worker_proc.startup.parts import make_backend, make_layout, make_sampler
from worker_proc.startup.prepare import prepare_model

LONGEST, NUM_TOKENS, NUM_SEQS = 100, 64, 5


def test_the_worst_steps_are_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_checkpoint(tmp_path, MistralConfig(**SHAPE, sliding_window=WINDOW))
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path), device=Device.CPU, max_model_len=LONGEST),
        cache=CacheConfig(block_size=16),
        scheduler=SchedulerConfig(max_num_seqs=NUM_SEQS, max_num_batched_tokens=NUM_TOKENS),
    )
    prepared = prepare_model(config, lambda *_: None)
    layout = make_layout(prepared.loaded, config)
    backend = make_backend(prepared.loaded, layout, None)
    steps: list[list[tuple[int, int]]] = []
    rows: list[tuple[str, int]] = []
    compute, sample, describe = memory.compute_logits, Sampler.sample, Sampler.prompt_logprobs

    def record(model: object, backend: object, inputs: StepInputs, *args: object) -> torch.Tensor:
        steps.append([(part.start, part.end) for part in inputs.parts])
        logits = compute(model, backend, inputs, *args)  # type: ignore[arg-type]
        assert logits.isfinite().all()
        return logits

    def record_sample(self: Sampler, logits: torch.Tensor, *args: object) -> object:
        rows.append(("sampled", len(logits)))
        return sample(self, logits, *args)  # type: ignore[arg-type]

    def record_prompt(self: Sampler, logits: torch.Tensor, *args: object) -> object:
        assert logits.shape[1] == VOCAB_SIZE
        rows.append(("described", len(logits)))
        return describe(self, logits, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(memory, "compute_logits", record)
    monkeypatch.setattr(Sampler, "sample", record_sample)
    monkeypatch.setattr(Sampler, "prompt_logprobs", record_prompt)
    sampler = make_sampler(prepared.loaded, None)
    memory.profile_run(prepared.loaded, backend, layout, sampler, config)
    decodes = [(LONGEST - 1, LONGEST)] * (NUM_SEQS - 1)
    chunk = (LONGEST - (NUM_TOKENS - len(decodes)), LONGEST)
    assert steps == [[*decodes, chunk], [(0, NUM_TOKENS)]]
    assert rows == [("sampled", NUM_SEQS), ("described", NUM_TOKENS)]


def test_a_cache_on_a_gpu_has_whole_steps() -> None:
    """A worker that replaces another has as many blocks, though others use a little more."""
    step = memory.CUDA_STEP_BYTES
    assert (
        memory.whole_steps(9 * step + 70_000_000) == memory.whole_steps(9 * step + 12) == 9 * step
    )
    assert memory.whole_steps(-5) == memory.whole_steps(step - 1) == 0
