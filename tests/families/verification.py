"""Serves a family's checkpoint in every way, and compares its tokens with transformers'."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PretrainedConfig, PreTrainedModel

from protocol.client import EngineClient
from protocol.lifecycle import Role
from protocol.sampling import SamplingParams
from scripts.testing import LOAD_TIMEOUT_S, EngineFactory
from tests.system.successors import pid_of, wait_for
from tests.worker.checkpoints import build_checkpoint
from tests.worker.driving import drive
from tests.worker.parity import (
    GREEDY,
    MAX_TOKENS,
    MODES,
    ROOMY,
    TIGHT,
    generate,
    is_greedy,
    make_prompts,
    make_runner,
)
from worker_proc.loading.text_model import auto_class
from worker_proc.loading.unbuilt_parts import without_libraries

NUM_KILLED_PROMPTS = 3
NUM_KILLED_TOKENS = 500
"""In each answer: half a second of steps at least, so that both deaths come before the end."""
DECIDED_BY_FORWARD = {"nemo_speechlm", "nemotron_h", "nemotron_h_omni", "zamba2"}
"""Types whose decoding with a cache by transformers differs from its forward, in long texts."""
_BLOCKS_OF_TIGHT_POOLS = {"deepseek_v4": 80}
"""Where a text has blocks in several groups: fewer would cut it."""
COLUMNS = ("whole prompts", "chunks of 16", "preempted", "cached prefix", "killed")
"""The ways in which a model is served, in fp32."""
_MODES = ("whole_prompts", "chunked", "preempted_chunked", "prefix_cache")


class Verified(NamedTuple):
    """What is known of a family."""

    model_type: str
    decoder: str  # which path computes the layers: native or modules
    exact_resume: bool
    equal: tuple[bool, ...]
    """By column: whether all tokens equal transformers'."""


def verify(
    make_config: Callable[[], PretrainedConfig], directory: Path, start_engine: EngineFactory
) -> Verified:
    """Write a checkpoint with random weights into the directory, and serve it."""
    torch.set_num_threads(1)
    config = make_config()
    # Towers may need libraries that are not installed.
    without_libraries(lambda: build_checkpoint(directory, config))
    # What transformers makes of the files counts: it clears some rows of embeddings, for example.
    read = partial(auto_class(config).from_pretrained, directory, dtype=torch.float32)
    model = without_libraries(read).eval()
    model.set_attn_implementation("eager")  # leaves attention in a model's own code as it is
    tight = _BLOCKS_OF_TIGHT_POOLS.get(model.config.model_type, TIGHT)
    runners = {ROOMY: make_runner(directory, ROOMY), TIGHT: make_runner(directory, tight)}
    prompts = make_prompts()
    equal = []
    for mode in _MODES:
        num_blocks, options = MODES[mode]
        run = drive(runners[num_blocks], prompts, GREEDY, **({"max_num_seqs": 16} | options))
        equal.append(_is_expected(model, prompts, run.output_token_ids, MAX_TOKENS))
    equal.append(_is_equal_after_kills(model, directory, prompts, start_engine))
    facts = runners[ROOMY].facts
    return Verified(model.config.model_type, facts.decoder, facts.exact_resume, tuple(equal))


def _is_equal_after_kills(
    model: PreTrainedModel, directory: Path, prompts: list[list[int]], start_engine: EngineFactory
) -> bool:
    """Kill the worker and then the core while requests run; all must go on where they were."""
    prompts = prompts[:NUM_KILLED_PROMPTS]
    model.generation_config.eos_token_id = None
    flags = ("--no-api", "--num-threads", "1", "--dtype", "float32")
    engine = start_engine(*flags, model=str(directory))
    wait_for(engine, Role.STANDBY, timeout_s=LOAD_TIMEOUT_S)
    params = SamplingParams(max_tokens=NUM_KILLED_TOKENS, temperature=0.0, ignore_eos=True)
    with EngineClient(engine.address) as client:
        client.wait_ready(LOAD_TIMEOUT_S)
        streams = [client.submit(prompt, params) for prompt in prompts]
        for role in (Role.WORKER, Role.CORE):
            victim = wait_for(engine, role)
            for stream in streams:
                assert next(stream).finish_reason is None, f"it ended before the {role} was killed"
            os.kill(pid_of(victim), signal.SIGKILL)
            wait_for(engine, role, victim.epoch, LOAD_TIMEOUT_S)
        outputs = [stream.result(LOAD_TIMEOUT_S).token_ids for stream in streams]
    engine.close()
    return _is_expected(model, prompts, outputs, NUM_KILLED_TOKENS)


def _is_expected(
    model: PreTrainedModel, prompts: list[list[int]], outputs: list[list[int]], num_tokens: int
) -> bool:
    """Return whether transformers continues the prompts so."""
    expected = [generate(model, prompt, num_tokens) for prompt in prompts]
    if model.config.model_type in DECIDED_BY_FORWARD:
        return all(
            output == own or is_greedy(model, prompt, output, num_tokens)
            for prompt, own, output in zip(prompts, expected, outputs, strict=True)
        )
    return outputs == expected
