"""The options of a scheduler: settings of the user, and facts of the model."""

from collections.abc import Mapping
from typing import Any

import msgspec

from protocol.config import DEFAULT_MAMBA_BLOCK_SIZE, EngineConfig
from protocol.model_facts import KVGroup, ModelFacts

VICTIM_CHOICES = ("policy", "cheapest")
_MAX_GROWN_BLOCKS = 2**18
"""Block ids that the tables of running requests grow by in one step, besides one for each of them.
They take 1.3 MB of a frame."""


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings are named and described as in `protocol.config`, facts as in `ModelFacts`."""

    # Facts of the model and of the memory.
    num_blocks: int = 1024
    """Blocks of the KV pool, the null block included."""
    block_size: int = 16
    kv_groups: tuple[KVGroup, ...] = (KVGroup(),)
    num_state_blocks: int = 0
    """State blocks, the null block included; 0: no group holds states."""
    num_host_blocks: int = 0
    """Host blocks for requests that are swapped out; 0: victims are always computed again."""
    num_host_state_blocks: int = 0
    """Host blocks for the states of such requests."""
    state_swap_blocks: float = 0.0
    swap_cost_tokens: float = 0.0
    max_model_len: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    computes_whole_prompts: bool = False

    # The bounds of a step.
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    max_num_scheduled_tokens: int | None = None
    max_steps_in_flight: int = 1
    pipeline_parallel_size: int = 1
    """Stages that compute different steps at the same time."""
    num_speculative_tokens: int = 0
    """Maximum number of drafts of a request in one step; 0: no speculation."""
    adaptive_speculation: bool = False
    has_draft_model: bool = False
    """A draft model makes the drafts, which costs time; else repetitions do."""

    # How prompts are cut.
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    """The threshold is at least a fair share of the step: see `Scheduler._threshold`."""
    max_num_partial_prefills: int = 0
    max_long_partial_prefills: int = 0
    elastic_token_budget: bool = False
    target_itl_ms: float = 0.0
    """Longest step alongside decoding requests, by which prompts are cut; 0: no limit."""

    # Which request is first, and which one is preempted.
    policy: str = "fcfs"
    tenant_weights: Mapping[str, float] = {}
    preempt_for_priority: bool = False
    victim_choice: str = "policy"

    # The KV cache.
    enable_prefix_caching: bool = True
    mamba_block_size: int = DEFAULT_MAMBA_BLOCK_SIZE
    """Tokens; a multiple of `block_size`."""
    enable_kv_events: bool = False
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0

    def __post_init__(self) -> None:
        for name, minimum in _MINIMA.items():
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise ValueError(f"{name} {value} must be at least {minimum}")
        if self.victim_choice not in VICTIM_CHOICES:
            choices = ", ".join(VICTIM_CHOICES)
            raise ValueError(f"victim_choice {self.victim_choice!r} must be one of {choices}")
        if not 0.0 <= self.watermark < 1.0:
            raise ValueError(f"watermark {self.watermark} must be in [0, 1)")
        if not self.kv_groups:
            raise ValueError("kv_groups must not be empty")
        if any(group.is_state for group in self.kv_groups[:-1]):
            raise ValueError("kv_groups must hold the state group at the end, and only one")
        if self.kv_groups[-1].is_state:
            self._check_states()
        elif self.num_state_blocks:
            raise ValueError("num_state_blocks needs a state group in kv_groups")
        if self.max_long_partial_prefills and not self.long_prefill_token_threshold:
            raise ValueError("max_long_partial_prefills needs a long_prefill_token_threshold")

    def _check_states(self) -> None:
        """Check the options of a model with recurrent layers."""
        if self.num_state_blocks < 2:
            raise ValueError(f"num_state_blocks {self.num_state_blocks} must be at least 2")
        if self.mamba_block_size % self.block_size:
            raise ValueError(
                f"mamba_block_size {self.mamba_block_size} must be a multiple of block_size"
                f" {self.block_size}"
            )

    @classmethod
    def combine(
        cls, config: EngineConfig, facts: ModelFacts, swap_cost_tokens: float
    ) -> "SchedulerOptions":
        """Take the settings from `config`, and all else from the workers' report."""
        values: dict[str, Any] = {}
        # The facts come last: they replace what was asked for.
        for source in (config.cache, config.scheduler, config.parallel, facts):
            values |= {name: getattr(source, name) for name in source.__struct_fields__}
        values |= {
            "num_blocks": facts.num_gpu_blocks,
            "max_steps_in_flight": max(
                config.scheduler.max_steps_in_flight, config.parallel.pipeline_parallel_size
            ),
            "kv_groups": tuple(facts.kv_groups),
            "eos_token_ids": tuple(facts.eos_token_ids),
            "swap_cost_tokens": swap_cost_tokens,
            "mamba_block_size": config.cache.snapshot_spacing(facts.block_size),
            "policy": config.scheduler.scheduling_policy,
            "has_draft_model": config.model.speculative_model is not None,
        }
        if facts.computes_whole_prompts:  # nothing may cut a prompt, nor take a part from a cache
            longest = max(facts.max_model_len, config.scheduler.max_num_batched_tokens)
            values |= {
                "max_num_batched_tokens": longest,
                "max_num_scheduled_tokens": None,
                "enable_chunked_prefill": False,
                "long_prefill_token_threshold": 0,
                "long_prefill_token_threshold_adaptive": False,
                "max_num_partial_prefills": 0,
                "max_long_partial_prefills": 0,
                "elastic_token_budget": False,
                "target_itl_ms": 0.0,
                "enable_prefix_caching": False,
                "num_host_blocks": 0,
            }
        else:  # bounds only steps of more than 2**18 / len(kv_groups) blocks
            most = _MAX_GROWN_BLOCKS * facts.block_size // len(facts.kv_groups)
            most = max(most, config.scheduler.max_num_seqs)
            for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
                values[name] = None if values[name] is None else min(values[name], most)
        return cls(**{name: values[name] for name in cls.__struct_fields__})

    @property
    def token_budget(self) -> int:
        """Maximum number of tokens of one step, unless it is stretched."""
        budget = self.max_num_scheduled_tokens
        return self.max_num_batched_tokens if budget is None else budget


_MINIMA = {
    "num_blocks": 2,
    "block_size": 1,
    "mamba_block_size": 1,
    "num_state_blocks": 0,
    "num_host_blocks": 0,
    "swap_cost_tokens": 0.0,
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "max_num_scheduled_tokens": 1,
    "max_steps_in_flight": 1,
    "pipeline_parallel_size": 1,
    "num_speculative_tokens": 0,
    "long_prefill_token_threshold": 0,
    "target_itl_ms": 0.0,
    "max_num_partial_prefills": 0,
    "max_long_partial_prefills": 0,
}
