"""The invariants that hold between any two steps of a scheduler, for tests and for debugging."""

from collections.abc import Sequence

from core_proc.kv.event_recorder import group_key
from core_proc.kv.kv_cache import KVCacheManager, prefix_root
from core_proc.kv.tables import live_blocks
from core_proc.request import BLOCKED, Request, RequestStatus
from core_proc.scheduler import Scheduler
from core_proc.scheduling.answer_size import MAX_ROW_BYTES, row_bytes
from protocol.core_worker import NULL_BLOCK


def check_invariants(scheduler: Scheduler) -> None:
    """Compare all redundant state; AssertionError at the first contradiction."""
    running, waiting = scheduler.running, scheduler.waiting.in_order()
    options = scheduler.options
    check_blocks(scheduler.kv, scheduler.holders())
    stretched = options.max_num_batched_tokens if options.elastic_token_budget else 0
    assert scheduler.largest_step <= max(options.token_budget, stretched)
    assert scheduler.num_accepted == scheduler.num_ended + len(scheduler.requests)
    assert len(running) <= options.max_num_seqs
    num_row_bytes = sum(row_bytes(request.sampling_params) for request in running)
    assert scheduler.queues.num_row_bytes == num_row_bytes <= MAX_ROW_BYTES
    assert len(scheduler.in_flight) <= options.max_steps_in_flight
    assert len(waiting) == scheduler.num_waiting
    assert len(running) + len(waiting) == len(scheduler.requests)
    assert {*running, *waiting} == set(scheduler.requests.values())
    indices = [request.admission_index for request in running]
    assert indices == sorted(set(indices))
    for request in running:
        num_quiet = request.due_at - scheduler.queues.due_index.now - 1
        assert request.num_computed_tokens + num_quiet <= scheduler.kv.num_slots(request)
        _check_running(request, _num_owed(scheduler, request), scheduler.kv.block_size)
    for request in waiting:
        is_loading = request in scheduler.loads
        _check_waiting(request, _num_owed(scheduler, request), is_loading=is_loading)
    scheduler.swapper.check_invariants(waiting)
    scheduler.partial_prefills.check_invariants(running)
    scheduler.queues.due_index.check_invariants(running)
    scheduler.speculation.check_invariants(running)


def _check_running(request: Request, num_owed: int, block_size: int) -> None:
    assert request.status is RequestStatus.RUNNING
    assert request.num_late_tokens == 0
    assert request.swapped_out is None
    num_drafts = request.num_drafts_in_flight
    assert num_drafts == 0 or num_owed == 1
    assert request.num_pending_tokens == num_owed + num_drafts
    assert request.num_tokens + num_owed + num_drafts <= request.max_num_tokens
    assert request.num_computed_tokens < request.num_tokens + num_drafts + max(num_owed, 1)
    assert request.num_computed_tokens <= len(request.block_tables[0]) * block_size


def _check_waiting(request: Request, num_owed: int, *, is_loading: bool) -> None:
    assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED, *BLOCKED)
    assert request.num_late_tokens == num_owed
    assert request.num_drafts_in_flight == request.num_draft_tokens == 0
    assert request.num_computed_tokens == 0
    assert bool(request.block_tables) == is_loading
    assert not is_loading or request.status is RequestStatus.WAITING_FOR_REMOTE_KV


def _num_owed(scheduler: Scheduler, request: Request) -> int:
    return sum(sampling.count(request) for _, sampling in scheduler.in_flight)


def check_blocks(kv: KVCacheManager, holders: Sequence[Request]) -> None:
    """Compare the pools with the tables of all requests that hold blocks."""
    kv.pool.check_invariants()
    if kv.states is not None:
        kv.states.check_invariants(holders)
    counts: dict[int, int] = {}
    texts: dict[int, int] = {}
    for request in holders:
        assert len({len(table) for table in request.block_tables}) == 1
        for group, table in enumerate(kv.kv_tables(request.block_tables)):
            live = live_blocks(table)
            assert len(set(live)) == len(live)
            assert len(live) == len(table) or kv.groups[group].window is not None
            assert request.num_hashed_blocks <= len(table)
            for index, block_id in enumerate(table):
                if block_id == NULL_BLOCK:
                    continue
                counts[block_id] = counts.get(block_id, 0) + 1
                known = kv.pool.hash_of(block_id)
                if index >= request.num_hashed_blocks:
                    assert known is None
                    assert kv.pool.ref_count(block_id) == 1
                    continue
                assert known == group_key(request.block_hashes[index], group)
                text = request.token_ids[: (index + 1) * kv.block_size].tobytes()
                owner = hash((group, prefix_root(request), text))
                assert texts.setdefault(block_id, owner) == owner
    assert all(kv.pool.ref_count(block_id) == count for block_id, count in counts.items())
    assert len(counts) + kv.pool.num_free == kv.pool.num_usable
