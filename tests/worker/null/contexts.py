"""Prompts for the null runner, and the tokens that it gives for them."""

import random

from protocol.model_facts import ModelFacts
from protocol.sampling import SamplingParams
from worker_proc.null.model import next_token_id

EOS = [2]
PARAMS = SamplingParams(max_tokens=20, temperature=0.0)


def facts(num_blocks: int = 400, block_size: int = 4) -> ModelFacts:
    return ModelFacts(
        model="null",
        vocab_size=300,
        max_model_len=200,
        block_size=block_size,
        num_gpu_blocks=num_blocks,
        eos_token_ids=EOS,
    )


def expected(prompt: list[int], num_tokens: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token_id(tokens, 300, EOS))
    return tokens[len(prompt) :]


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    shared = [rng.randrange(300) for _ in range(16)]
    return [
        shared[: rng.randrange(17)] + [rng.randrange(300) for _ in range(rng.randrange(1, 60))]
        for _ in range(16)
    ]
