"""The demo model, and greedy streams of it and of its adapters."""

from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from scripts.supervisor.model_names import BUNDLED_MODELS
from scripts.testing import Engine
from tests.system.null_load import Stream

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NUM_TOKENS = 48


def demo_model() -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        BUNDLED_MODELS["demo"], dtype=torch.float32
    )
    return model


def greedy(engine: Engine, model: str, number: int = 0, num_tokens: int = NUM_TOKENS) -> Stream:
    prompt = [5 + (11 * number + i) % 200 for i in range(40)]  # two blocks, and some tokens
    return Stream(engine.url(), model=model, prompt=prompt, max_tokens=num_tokens, temperature=0)


def have(streams: list[Stream], num_tokens: int) -> Callable[[], bool]:
    return lambda: all(len(stream.token_ids) >= num_tokens for stream in streams)
