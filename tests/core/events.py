"""Tables of options, requests and events from which random scheduler runs are drawn.

In the property tests hypothesis chooses from them, in the soak a seeded generator. Tokens are
a pure function of request and position.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from core_proc.options import SchedulerOptions
from core_proc.policy import POLICIES
from protocol.model_facts import KVGroup
from protocol.sampling import FinishReason, SamplingParams
from tests.core.harness import EOS

STOP_TOKEN = 5
MAX_PROMPT = 40
MAX_OUTPUTS = 24
SHARED_HEAD = list(range(10, 10 + MAX_PROMPT))

Values = Mapping[str, Sequence[Any]]
"""Values to draw from for each option; the first is the simplest."""

OPTIONS: Values = {
    "block_size": (4, 1, 2, 16),
    "room": (1.0, 0.5, 0.7, 1.3, 4.0),
    "windows": ((None,), (None,), (8,), (None, 8), (5, 17)),
    "num_states": (0, 0, 0, 1, 2, 3, 5, 12),
    "num_host_states": (0, 1, 5),
    "state_swap_blocks": (0.5, 2.0),
    "only_states": (False, False, False, True),
    "blocks_per_snapshot": (1, 2, 4, 100),
    "num_host_blocks": (0, 0, 7, 60),
    "swap_cost_tokens": (0.0, 0.5, 1e9),
    "max_model_len": (64, 24, 200),
    "max_num_seqs": (3, 1, 2, 8),
    "max_num_batched_tokens": (20, 3, 8, 64),
    "max_num_scheduled_tokens": (None, None, 3, 12),
    "num_speculative_tokens": (0, 0, 1, 4),
    "adaptive_speculation": (False, True, True),
    "has_draft_model": (False, True),
    "enable_chunked_prefill": (True, True, False),
    "long_prefill_token_threshold": (0, 0, 1, 5),
    "long_prefill_token_threshold_adaptive": (False, False, True),
    "max_num_partial_prefills": (0, 0, 1, 2),
    "max_long_partial_prefills": (0, 0, 1),
    "elastic_token_budget": (False, False, True),
    "target_itl_ms": (0.0, 0.0, 0.5, 3.0),
    "policy": tuple(POLICIES),
    "tenant_weights": ({}, {"a": 3.0}),
    "preempt_for_priority": (False, True),
    "victim_choice": ("policy", "cheapest"),
    "enable_prefix_caching": (True, True, False),
    "enable_kv_events": (False, True),
    "scheduler_reserve_full_isl": (True, False),
    "watermark": (0.0, 0.0, 0.1),
    "has_store": (False, True),
    "pipeline_parallel_size": (1, 1, 2, 3),
}
ARRIVAL: Values = {
    "length": (5, 1, 12, 17, 25, 33, MAX_PROMPT),
    "shared": (0, 3, 8, 16, 33),
    "source": (-1, 0, 1, 2),
    "num_outputs": (0, 0, 0, 1, 5),
    "max_tokens": (3, 1, 9, MAX_OUTPUTS, MAX_OUTPUTS),
    "stops": ((), (), (STOP_TOKEN,)),
    "ignore_eos": (True, False),
    "min_tokens": (0, 0, 4),
    "prompt_logprobs": (None, None, None, 0),
    "priority": (0, 1, 2),
    "arrival_time": (0.0, 1.0, 2.0),
    "tenant": ("", "a", "b"),
    "salt": ("", "", "salt"),
    "adapter_id": (0, 0, 1),
    "is_blocked": (False, False, False, True),
    "grammar": (None, None, None, None, "a", "b", "c"),
    "pooling": (None, None, None, None, None, None, "last", "mean"),
}
WHICH = range(6)
EVENTS: dict[str, tuple[int, Values]] = {
    "add": (8, ARRIVAL),
    "work": (6, {"rounds": (1, 2, 4, 8, 16)}),
    "schedule": (4, {}),
    "update": (4, {}),
    "abort": (1, {"which": WHICH}),
    "fail": (1, {"which": WHICH}),
    "preempt": (1, {"which": WHICH}),
    "unblock": (1, {"which": WHICH}),
    "hold": (2, {"which": WHICH}),
    "compile": (2, {"which": WHICH, "error": ("", "", "", "no such rule")}),
    "begin_load": (1, {"which": WHICH, "share": (1.0, 0.5)}),
    "end_load": (1, {"which": WHICH, "share": (1.0, 0.5, 0.0)}),
    "disturb": (
        2,
        {"kind": ("resume", "reset", "reset_all", "pause_new", "pause_all", "sleep", "lose")},
    ),
}
"""Weight of each event for a random driver, and the values of its arguments."""
EVENT_NAMES = [name for name, (weight, _) in EVENTS.items() for _ in range(weight)]


def make_options(drawn: Mapping[str, Any], max_steps_in_flight: int) -> SchedulerOptions:
    """Complete a draw of `OPTIONS` to consistent scheduler options.

    `room` is the pool's size in requests of the greatest length, `num_states` the number of usable
    state blocks: with 0 there is no state group. `has_store` is none of them.
    """
    settings = dict(drawn)
    settings.pop("has_store")
    room, windows, block_size = settings.pop("room"), settings.pop("windows"), drawn["block_size"]
    chunk = drawn["max_num_batched_tokens"]
    groups = tuple(make_group(window, chunk, block_size) for window in windows)
    num_states, only_states = settings.pop("num_states"), settings.pop("only_states")
    num_host_states = settings.pop("num_host_states")
    settings["mamba_block_size"] = settings.pop("blocks_per_snapshot") * block_size
    if num_states:
        groups = (() if only_states else groups) + (KVGroup(is_state=True),)
        settings |= {
            "num_state_blocks": 1 + num_states,
            "num_host_state_blocks": num_host_states,
        }
    if drawn["pipeline_parallel_size"] > 1:
        settings |= {"num_speculative_tokens": 0, "target_itl_ms": 0.0}
    if not drawn["long_prefill_token_threshold"]:
        settings["max_long_partial_prefills"] = 0
    if drawn["max_num_scheduled_tokens"] is not None:
        settings["max_num_scheduled_tokens"] = min(chunk, drawn["max_num_scheduled_tokens"])
    longest = min(MAX_PROMPT + MAX_OUTPUTS, drawn["max_model_len"]) - 1
    settings["num_blocks"] = 2 + int(room * num_blocks_for(longest, block_size, groups))
    return SchedulerOptions(
        kv_groups=groups,
        max_steps_in_flight=max_steps_in_flight,
        eos_token_ids=(EOS,),
        **settings,
    )


def make_group(window: int | None, chunk: int, block_size: int) -> KVGroup:
    """Describe a group: its blocks hold at most the window and a chunk, at any offset."""
    if window is None:
        return KVGroup()
    return KVGroup(window, 1 - (-(window + chunk - 2) // block_size))


def num_blocks_for(num_tokens: int, block_size: int, groups: Sequence[KVGroup]) -> int:
    """Return the largest number of blocks that a request with these computed tokens holds."""
    num_blocks = -(-num_tokens // block_size)
    counts = (group.max_blocks or num_blocks for group in groups if not group.is_state)
    return sum(min(num_blocks, count) for count in counts)


def sample(req_id: int, position: int) -> int:
    """Return the token of a position: one in 24 is EOS, another a frequent stop token."""
    value = zlib.crc32(b"%d:%d" % (req_id, position)) % 24
    return EOS if value == 0 else STOP_TOKEN if value == 1 else 100 + value


def expected(params: SamplingParams, req_id: int, most: int) -> tuple[list[int], FinishReason]:
    """Return all outputs of an undisturbed request, and its finish reason."""
    tokens: list[int] = []
    has_grammar = params.grammar is not None
    ignores_eos = params.ignore_eos and not has_grammar
    stops = set(params.stop_token_ids) | (set() if ignores_eos else {EOS})
    while True:
        tokens.append(sample(req_id, len(tokens)))
        is_complete = has_grammar and tokens[-1] == EOS
        if tokens[-1] in stops and (is_complete or len(tokens) >= params.min_tokens):
            return tokens, FinishReason.STOP
        if len(tokens) == most:
            return tokens, FinishReason.LENGTH


def draw(values: Values, choose: Callable[[Sequence[Any]], Any]) -> dict[str, Any]:
    """Draw one value for each name."""
    return {name: choose(choices) for name, choices in values.items()}
