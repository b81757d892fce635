"""No decision of the scheduler changes a token: fp32, greedy and seeded, on a model with windows.

Each way to schedule is compared with the plainest one: whole prompts, one at a time.
"""

from dataclasses import dataclass

import msgspec
import pytest

from protocol.sampling import SamplingParams
from tests.worker.checkpoints import ARCHITECTURES, Architecture
from tests.worker.driving import Run, drive
from tests.worker.parity import BLOCK_SIZE, NUM_PROMPTS, ROOMY, Serve, make_runner

MAX_TOKENS = 12
SWAP_SPACE_BYTES = 8 << 20
MODELS = [a for a in ARCHITECTURES if a.name in ("llama", "gemma3")]
TIGHT = {"llama": 44, "gemma3": 76}
"""Fewer blocks than the requests need together."""


@dataclass(frozen=True)
class Way:
    """Options of a scheduler, and the events that must have happened under them."""

    options: dict[str, object]
    tight: bool = False
    preempts: bool = False
    swaps: bool = False
    hits: bool = False


PLAIN = {"enable_prefix_caching": False, "max_num_batched_tokens": 512}
EAGER = {"scheduler_reserve_full_isl": False, "max_num_seqs": 16}
WAYS = {
    "batched": Way({**PLAIN, "max_num_seqs": 16}),
    "chunked": Way({**PLAIN, "max_num_seqs": 16, "max_num_batched_tokens": 16}),
    "cached": Way({"max_num_seqs": 4}, hits=True),
    "recomputed": Way({**PLAIN, **EAGER}, tight=True, preempts=True),
    "swapped": Way({**PLAIN, **EAGER, "swap_cost_tokens": 0.0}, True, preempts=True, swaps=True),
    "swapped and chunked, cheapest first": Way(
        {**EAGER, "max_num_batched_tokens": 24, "victim_choice": "cheapest"},
        tight=True,
        preempts=True,
        swaps=True,
    ),
    "two in flight": Way({**PLAIN, "max_num_seqs": 16, "max_steps_in_flight": 2}),
    "four in flight, all of it at once": Way(
        {
            **EAGER,
            "max_num_batched_tokens": 24,
            "max_steps_in_flight": 4,
            "policy": "shortest",
            "long_prefill_token_threshold": 8,
            "max_num_partial_prefills": 3,
            "elastic_token_budget": True,
        },
        tight=True,
        preempts=True,
        swaps=True,
        hits=True,
    ),
}
SAMPLING = {
    "greedy": [SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)] * NUM_PROMPTS,
    "seeded": [
        SamplingParams(
            max_tokens=MAX_TOKENS, temperature=0.9, top_p=0.95, seed=seed, repetition_penalty=1.1
        )
        for seed in range(NUM_PROMPTS)
    ],
}


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("architecture", MODELS, ids=lambda a: a.name)
def test_tokens_are_equal_however_they_are_scheduled(
    architecture: Architecture, serve: Serve
) -> None:
    served = serve(architecture)
    roomy = make_runner(served.directory, ROOMY)
    tight = make_runner(
        served.directory, TIGHT[architecture.name], swap_space_bytes=SWAP_SPACE_BYTES
    )
    assert max(map(len, served.prompts)) > 4 * BLOCK_SIZE, "prompts fill several blocks"
    for kind, params in SAMPLING.items():
        plain = drive(roomy, served.prompts, params, **PLAIN, max_num_seqs=1)
        for name, way in WAYS.items():
            options = dict(way.options)
            if way.tight and not way.swaps:
                options["num_host_blocks"] = 0
            run = drive(tight if way.tight else roomy, served.prompts, params, **options)
            assert run.output_token_ids == plain.output_token_ids, (kind, name)
            _check_happened(run, way, name)


WAYS_WITH_DRAFTS = [
    "chunked",
    "cached",
    "swapped and chunked, cheapest first",
    "four in flight, all of it at once",
]
NUM_DRAFTS = 3
FEW = dict.fromkeys((17, 23, 99, 260), 60.0)
"""With this bias almost only four tokens are chosen, so that pairs of them repeat."""


@pytest.mark.usefixtures("_backend")
@pytest.mark.parametrize("architecture", MODELS, ids=lambda a: a.name)
def test_tokens_are_equal_with_drafts(architecture: Architecture, serve: Serve) -> None:
    served = serve(architecture)
    roomy, tight = (
        make_runner(
            *(served.directory, num_blocks),
            num_speculative_tokens=NUM_DRAFTS,
            swap_space_bytes=SWAP_SPACE_BYTES,
        )
        for num_blocks in (ROOMY, TIGHT[architecture.name])
    )
    without = make_runner(served.directory, ROOMY)
    params = [pair[i % 2] for i, pair in enumerate(zip(*SAMPLING.values(), strict=True))]
    biased = [
        msgspec.structs.replace(p, logit_bias=FEW, max_tokens=2 * MAX_TOKENS, ignore_eos=True)
        for p in params
    ]
    plain = drive(without, served.prompts, biased, **PLAIN, max_num_seqs=1)
    for name in WAYS_WITH_DRAFTS:
        way = WAYS[name]
        options = way.options | {"num_speculative_tokens": NUM_DRAFTS}
        run = drive(tight if way.tight else roomy, served.prompts, biased, **options)
        assert run.output_token_ids == plain.output_token_ids, name
        assert run.num_accepted_drafts > 30, name
        assert (run.num_preemptions > 0) == way.preempts, name


def _check_happened(run: Run, way: Way, name: str) -> None:
    assert (run.num_preemptions > 0) == way.preempts, name
    assert (run.num_swaps > 0) == way.swaps, name
    assert run.num_cached_tokens > 0 or not way.hits, name
