"""Checkpoints served by the real scheduler and runner, and the outputs of transformers for them."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from tests.worker.checkpoints import VOCAB_SIZE, Architecture
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
    """Return prompts of mixed lengths, some with a common prefix, and two that are equal."""
    rng = random.Random(11)
    shared = [rng.randrange(3, VOCAB_SIZE) for _ in range(SHARED_PREFIX_LEN)]
    prompts = []
    for index in range(NUM_PROMPTS - 1):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, 40))]
        prompts.append(shared + own if index % 3 == 0 else own)
    prompts[5] = prompts[6][:1]
    prompts[7] = [*prompts[7], *own][: 4 * BLOCK_SIZE]
    return [*prompts, list(prompts[7])]


def few_prompts() -> list[list[int]]:
    """Return eight prompts of `make_prompts` that have every kind of its lengths and prefixes.

    Three have a common prefix, one is a single token, and the last two are equal, of whole blocks.
    """
    prompts = make_prompts()
    return [*prompts[:2], *prompts[3:8], prompts[-1]]


def _forget_states(model: PreTrainedModel) -> None:
    """Let the next text begin anew: RecurrentGemma begins with the states of the text before."""
    for module in model.modules():
        if "conv1d_state" in module.__dict__:
            module.conv1d_state = None


def generate(model: PreTrainedModel, prompt: list[int], max_tokens: int) -> list[int]:
    """Return transformers' greedy continuation."""
    _forget_states(model)
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=max_tokens,
        do_sample=False,
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


@torch.inference_mode()
def is_greedy(
    model: PreTrainedModel, prompt: list[int], output: list[int], max_tokens: int
) -> bool:
    """Return whether each token is the most likely one in transformers' forward over all.

    The output must end at the first token that ends a text, or else after `max_tokens`.
    """
    if not output or len(output) > max_tokens or output != _until_end(model, output):
        return False
    if len(output) < max_tokens and output[-1] not in _end_tokens(model):
        return False
    _forget_states(model)
    rows = model(torch.tensor([prompt + output[:-1]]), use_cache=False).logits[0]
    likeliest: list[int] = rows[len(prompt) - 1 :].argmax(-1).tolist()
    return likeliest == output


def generate_all(
    model: PreTrainedModel, prompts: list[list[int]], max_tokens: int
) -> list[list[int]]:
    """Return what `generate` returns for each prompt, with fewer calls of the model.

    A batch of padded prompts gives candidates. One forward over each text alone shows whether they
    are its most likely tokens; `generate` continues a text of which they are not.
    """
    try:
        candidates = _generate_padded(model, prompts, max_tokens)
    except Exception:  # the code of some models takes no padded prompts
        return [generate(model, prompt, max_tokens) for prompt in prompts]
    return [
        tokens
        if is_greedy(model, prompt, tokens, max_tokens)
        else generate(model, prompt, max_tokens)
        for prompt, tokens in zip(prompts, candidates, strict=True)
    ]


def _generate_padded(
    model: PreTrainedModel, prompts: list[list[int]], max_tokens: int
) -> list[list[int]]:
    longest = max(map(len, prompts))
    padding = [[0] * (longest - len(prompt)) for prompt in prompts]
    padded = torch.tensor([left + prompt for left, prompt in zip(padding, prompts, strict=True)])
    mask = torch.tensor(
        [[0] * len(left) + [1] * (longest - len(left)) for left in padding], dtype=torch.long
    )
    _forget_states(model)
    output = model.generate(
        padded,
        attention_mask=mask,
        max_new_tokens=max_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    return [_until_end(model, tokens) for tokens in output[:, longest:].tolist()]


def _until_end(model: PreTrainedModel, tokens: list[int]) -> list[int]:
    """Return the tokens up to the first one that ends a text, or all of them."""
    ends = _end_tokens(model)
    places = (place for place, token in enumerate(tokens) if token in ends)
    return tokens[: next(places, len(tokens)) + 1]


def _end_tokens(model: PreTrainedModel) -> set[int]:
    end = model.generation_config.eos_token_id
    return {end} if isinstance(end, int) else {*(end or ())}


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
