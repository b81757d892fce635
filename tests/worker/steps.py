"""Steps and new requests, as the core sends them to a worker."""

from collections.abc import Sequence

from protocol.core_worker import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from protocol.message import pack_token_ids
from protocol.sampling import SamplingParams

BLOCK_SIZE = 4


def new(
    req_id: int,
    num_tokens: int = 6,
    blocks: Sequence[int] | None = None,
    computed: int = 0,
    cached: int | None = None,
) -> NewRequestData:
    """A request of tokens 10, 11, ... with exactly the blocks that it needs."""
    if blocks is None:
        first = 10 * req_id + 1
        blocks = range(first, first + -(-num_tokens // BLOCK_SIZE))
    return NewRequestData(
        req_id=req_id,
        token_ids=pack_token_ids(range(10, 10 + num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling_params=SamplingParams(),
        block_ids=[list(blocks)],
        num_computed_tokens=computed,
        num_cached_tokens=computed if cached is None else cached,
    )


def step(
    step_id: int,
    total: int,
    news: Sequence[NewRequestData] = (),
    *,
    counts: dict[int, int] | None = None,
    grown: dict[int, list[list[int]]] | None = None,
    preempted: Sequence[int] = (),
    finished: Sequence[int] = (),
) -> SchedulerOutput:
    grown = grown or {}
    return SchedulerOutput(
        step_id=step_id,
        scheduled_new_reqs=list(news),
        scheduled_cached_reqs=CachedRequestData(list(grown), list(grown.values())),
        num_scheduled_tokens=counts or {},
        total_num_scheduled_tokens=total,
        preempted_req_ids=list(preempted),
        finished_req_ids=list(finished),
    )
