"""Greedy tokens equal those of transformers' `generate`, however the scheduler cuts the work."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

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
from tests.worker.checkpoints import (
    ARCHITECTURES,
    LATENT_NAMES,
    VOCAB_SIZE,
    Architecture,
)
from tests.worker.driving import drive
from tests.worker.families import FAMILIES
from tests.worker.own_attention_models import KINDS as OWN_KINDS
from tests.worker.own_attention_models import OWN_ATTENTION
from tests.worker.recurrent_models import KINDS, RECURRENT, RECURRENT_LATENT_NAMES
from tests.worker.runners import make_runners
from worker_proc.model_runner import ModelRunner
from worker_proc.startup.load_runner import load_model_runner

NUM_PROMPTS = 16
MAX_TOKENS = 12
BLOCK_SIZE = 4
SHARED_PREFIX_LEN = 9


@dataclass(frozen=True, slots=True)
class Served:
    """One architecture's checkpoint, and the outputs of transformers for the prompts."""

    directory: Path
    prompts: list[list[int]]
    expected: list[list[int]]


def make_prompts() -> list[list[int]]:
    """Mixed lengths, some with a common prefix, two equal (a whole prompt in the cache)."""
    rng = random.Random(11)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(SHARED_PREFIX_LEN)]
    prompts = []
    for index in range(NUM_PROMPTS - 1):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 40))]
        prompts.append(shared + own if index % 3 == 0 else own)
    prompts[5] = prompts[6][:1]
    prompts[7] = [*prompts[7], *own][: 4 * BLOCK_SIZE]
    return [*prompts, list(prompts[7])]


def generate(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """Return transformers' greedy continuation."""
    for module in model.modules():  # RecurrentGemma begins with the states of the text before
        if "conv1d_state" in module.__dict__:
            module.conv1d_state = None
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def parity_config(
    directory: Path,
    num_blocks: int | None,
    dtype: str = "float32",
    num_speculative_tokens: int = 0,
    speculative_model: Path | None = None,
    *,
    max_model_len: int | None = None,
    **cache: Any,
) -> EngineConfig:
    """Return settings with a pool of `num_blocks` on the CPU; None: as the memory allows."""
    return EngineConfig(
        model=ModelConfig(
            model=str(directory),
            dtype=Dtype(dtype),
            device=Device.CPU,
            max_model_len=max_model_len,
            speculative_model=None if speculative_model is None else str(speculative_model),
        ),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=num_blocks, **cache),
        scheduler=SchedulerConfig(
            max_num_batched_tokens=512, num_speculative_tokens=num_speculative_tokens
        ),
        worker=WorkerConfig(num_threads=1),
    )


def make_runner(directory: Path, num_blocks: int | None, *args: Any, **more: Any) -> ModelRunner:
    """Load a checkpoint with the settings of `parity_config`."""
    config = parity_config(directory, num_blocks, *args, **more)
    return load_model_runner(config, lambda phase, done, total: None)


Serve = Callable[[Architecture], Served]


GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
ROOMY, TIGHT = 400, 60
"""Blocks: enough for all requests, and too few, which preempts most of them."""
MODES: dict[str, tuple[int, dict[str, object]]] = {
    "whole_prompts": (ROOMY, {"enable_prefix_caching": False}),
    "chunked": (ROOMY, {"enable_prefix_caching": False, "max_num_batched_tokens": 16}),
    "prefix_cache": (ROOMY, {"max_num_seqs": 4}),
    "preempted": (
        TIGHT,
        {"scheduler_reserve_full_isl": False, "max_num_batched_tokens": 48},
    ),
    "preempted_chunked": (
        TIGHT,
        {
            "scheduler_reserve_full_isl": False,
            "max_num_batched_tokens": 16,
            "enable_prefix_caching": False,
        },
    ),
}


def modes_of(num_blocks: int) -> dict[str, dict[str, object]]:
    """Return the options of the scheduler in each mode with this number of blocks."""
    return {mode: options for mode, (blocks, options) in MODES.items() if blocks == num_blocks}


WITHOUT_KERNELS = ("llama", "gemma2", "gpt_oss", "deepseek_v2", "qwen3_next", "bloom")
"""Architectures of different kinds that the default tests compute without the C++ kernels, too."""
MORE = (*FAMILIES, *RECURRENT[len(KINDS) :], *OWN_ATTENTION[3:])
"""Architectures of kinds that others stand for."""


def _paths() -> list[Any]:
    """Every architecture, with and without the kernels; most of these are slow."""
    cases = []
    for backend in ("native", "sdpa"):
        for one in (*ARCHITECTURES, *KINDS, *OWN_KINDS, *MORE):
            is_slow = one in MORE or (backend == "sdpa" and one.name not in WITHOUT_KERNELS)
            marks = pytest.mark.slow if is_slow else ()
            cases.append(pytest.param(backend, one, marks=marks, id=f"{backend}-{one.name}"))
    return cases


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize(("_backend", "architecture"), _paths(), indirect=["_backend"])
def test_outputs_equal_generate_in_every_mode(architecture: Architecture, serve: Serve) -> None:
    served = serve(architecture)
    assert_varied(served.expected)
    num_preemptions = dict.fromkeys((ROOMY, TIGHT), 0)
    configs = [parity_config(served.directory, num_blocks) for num_blocks in num_preemptions]
    for runner in make_runners(configs):
        num_blocks, groups = runner.facts.num_gpu_blocks, runner.facts.kv_groups
        for tensors in runner._pool.tensors:
            is_latent = tensors.values is tensors.keys  # one row for keys and values of all heads
            assert is_latent == (architecture.name in LATENT_NAMES | RECURRENT_LATENT_NAMES)
        for mode, options in modes_of(num_blocks).items():
            run = drive(runner, served.prompts, GREEDY, **({"max_num_seqs": 16} | options))
            assert served.expected == run.output_token_ids, mode
            num_preemptions[num_blocks] += run.num_preemptions
            assert (run.num_cached_tokens > 0) or mode != "prefix_cache"
    if any(group.window is None and not group.is_state for group in groups):
        # Where all layers have windows, even a tiny pool may be enough.
        assert num_preemptions[TIGHT] > 0 == num_preemptions[ROOMY]


def assert_varied(outputs: Sequence[list[int]]) -> None:
    """Parity would prove little if every token were the same."""
    assert len({tuple(output) for output in outputs}) > NUM_PROMPTS // 2
    assert len({token for output in outputs for token in output}) > 12
