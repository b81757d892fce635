"""The scheduler's settings, and the base class of every group of settings."""

from typing import Annotated

import msgspec
from msgspec import Meta

TenantName = Annotated[str, Meta(min_length=1, max_length=256)]
Weight = Annotated[float, Meta(gt=0.0, le=1e6)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A group of settings; field names are unique over all sections."""


class SchedulerConfig(Section):
    """How a step is filled."""

    max_num_seqs: Annotated[
        int, Meta(ge=1, le=16384, description="Most requests computed in one step.")
    ] = 64
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, le=2**20, description="Most tokens computed in one step.")
    ] = 2048
    max_num_scheduled_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=2**20)] | None,
        Meta(description="Token budget of a step, if less than that."),
    ] = None
    long_prefill_token_threshold: Annotated[
        int,
        Meta(
            ge=0, le=2**20, description="Most prompt tokens of one request per step; 0: no limit."
        ),
    ] = 0
    enable_chunked_prefill: Annotated[
        bool, Meta(description="Split prompts over steps where the budget ends.")
    ] = True
    long_prefill_token_threshold_adaptive: Annotated[
        bool,
        Meta(
            description="Make that threshold at least a fair share of the step, so that there is "
            "one even if it is 0, and fewer requests mean larger pieces."
        ),
    ] = False
    max_num_partial_prefills: Annotated[
        int,
        Meta(
            ge=0,
            le=16384,
            description="Most requests whose prompts are computed over several steps at a time; "
            "0: any number.",
        ),
    ] = 0
    max_long_partial_prefills: Annotated[
        int,
        Meta(
            ge=0,
            le=16384,
            description="Of these, most that are longer than long_prefill_token_threshold: "
            "shorter ones overtake; 0: any number.",
        ),
    ] = 0
    elastic_token_budget: Annotated[
        bool,
        Meta(
            description="While no request waits, prompts use the rest of a step's tokens, up to "
            "max_num_batched_tokens.",
        ),
    ] = False
    scheduling_policy: Annotated[
        str,
        Meta(
            pattern="^(fcfs|priority|shortest|fair)$",
            description="Order of admission: fcfs, priority (lower first), shortest (fewest tokens "
            "to compute, with ageing) or fair (tenants share by tenant_weights).",
        ),
    ] = "fcfs"
    tenant_weights: Annotated[
        dict[TenantName, Weight],
        Meta(
            max_length=1024,
            description="Shares of tenants under the fair policy, like gold=4,free=1 (in YAML a "
            "mapping); 1 for tenants that are not named.",
        ),
    ] = {}
    preempt_for_priority: Annotated[
        bool,
        Meta(
            description="Under the priority policy, preempt running requests for waiting ones that "
            "are more important.",
        ),
    ] = False
    victim_choice: Annotated[
        str,
        Meta(
            pattern="^(policy|cheapest)$",
            description="Which request is preempted when KV blocks run out: policy (the last one "
            "under the scheduling policy) or cheapest (the one that costs least to compute again).",
        ),
    ] = "policy"
    scheduler_reserve_full_isl: Annotated[
        bool,
        Meta(description="Admit a request only when the cache has room for all its tokens so far."),
    ] = True
    watermark: Annotated[
        float,
        Meta(ge=0.0, lt=1.0, description="Share of KV blocks kept free at admission."),
    ] = 0.0
    max_steps_in_flight: Annotated[
        int,
        Meta(ge=1, le=8, description="Steps dispatched to the worker before the first returns."),
    ] = 2
    num_speculative_tokens: Annotated[
        int,
        Meta(
            ge=0,
            le=16,
            description="Most tokens that are guessed ahead for a request, from repetitions in its "
            "text, and verified together in one step; 0: none. Never changes what is sampled.",
        ),
    ] = 0
    max_num_waiting: Annotated[
        int,
        Meta(ge=1, le=10**6, description="Most requests in the queue; past it: refused with 429."),
    ] = 10_000
    max_waiting_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=2**31,
            description="Most prompt tokens in the queue; past it: refused with 429. A prompt that "
            "finds the queue empty is taken, however long.",
        ),
    ] = 2**22
