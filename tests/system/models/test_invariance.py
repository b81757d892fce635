"""Seeded sampling does not depend on batch, chunks or preemption: demo model, whole engine."""

from typing import Any

import pytest

from protocol.config.settings import configure
from protocol.sampling import SamplingParams
from scripts.inprocess import InprocEngine
from tests.paths import DEMO_MODEL

NUM_REQUESTS = 32
MAX_TOKENS = 24


def request(number: int) -> tuple[list[int], SamplingParams]:
    """Return a prompt of 5 to 67 tokens, and one of several mixes of all sampling parameters."""
    prompt = [(number * 131 + position * 17) % 4000 + 2 for position in range(5 + 2 * number)]
    mixes: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 20},
        {"temperature": 1.3, "top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.4},
        {"temperature": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "logit_bias": {77: 2.0}},
    ]
    mix = mixes[number % len(mixes)]
    params = SamplingParams(max_tokens=MAX_TOKENS, seed=1000 + number, ignore_eos=True, **mix)
    return prompt, params


def run(numbers: list[int], **settings: Any) -> tuple[dict[int, list[int]], int]:
    """Return tokens by request number, and the number of preemptions."""
    model = str(DEMO_MODEL)
    # One thread: two on a busy processor would mostly wait for each other.
    engine = InprocEngine(configure(model=model, num_threads=1, **settings))
    tokens: dict[int, list[int]] = {}
    owners = {engine.submit(*request(number)): number for number in numbers}
    while engine.has_unfinished:
        for output in engine.step():
            tokens.setdefault(owners[output.request_id], []).extend(output.token_ids)
    return tokens, engine.stats().num_preemptions


@pytest.mark.parametrize(
    "computed",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "w4a16"},
        pytest.param({"dtype": "bfloat16", "quantization": "w8a16"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16", "quantization": "w8a8"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16", "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, marks=pytest.mark.slow),
        pytest.param({"dtype": "float32", "kv_cache_dtype": "int8"}, marks=pytest.mark.slow),
    ],
    ids=lambda computed: "-".join(computed.values()),
)
def test_seed_decides_alone(computed: dict[str, str]) -> None:
    """Tokens are the same in a batch of 32, alone, chunked, and after preemptions."""
    together, _ = run(list(range(NUM_REQUESTS)), num_gpu_blocks_override=400, **computed)
    assert all(len(tokens) == MAX_TOKENS for tokens in together.values())
    assert len({tuple(tokens) for tokens in together.values()}) == NUM_REQUESTS
    for number in (0, 3, 14, 29):
        alone, _ = run([number], num_gpu_blocks_override=400, **computed)
        assert alone[number] == together[number]
    chunked, _ = run(
        list(range(NUM_REQUESTS)),
        num_gpu_blocks_override=400,
        max_num_batched_tokens=16,
        max_num_seqs=16,
        **computed,
    )
    assert chunked == together
    preempted, num_preemptions = run(
        list(range(NUM_REQUESTS)), num_gpu_blocks_override=24, **computed
    )
    assert num_preemptions > 0
    assert preempted == together
