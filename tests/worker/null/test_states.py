"""State tables: what the mirror refuses, and what the null runner finds wrong in their contents."""

from collections.abc import Sequence

import msgspec
import pytest

from protocol.core_worker import BlockCopies, NewRequestData, SchedulerOutput
from protocol.model_facts import KVGroup, ModelFacts
from tests.worker.driving import drive
from tests.worker.null.contexts import PARAMS, expected, facts, prompts
from tests.worker.steps import new, step
from worker_proc.errors import MirrorError
from worker_proc.mirror import Mirror
from worker_proc.null.runner import NullRunner

BLOCK_SIZE = 4


def state_facts(num_states: int = 20, num_blocks: int = 400, *, has_kv: bool = True) -> ModelFacts:
    groups = [KVGroup()] * has_kv + [KVGroup(is_state=True)]
    return msgspec.structs.replace(
        facts(num_blocks), kv_groups=groups, num_state_blocks=num_states + 1
    )


def with_states(
    req_id: int,
    table: Sequence[int],
    num_tokens: int = 6,
    computed: int = 0,
    *,
    cached: int | None = None,
) -> NewRequestData:
    """Return a request of tokens 10, 11, ... with KV blocks of its own and this state table."""
    first = 10 * req_id
    return msgspec.structs.replace(
        new(req_id, num_tokens, computed=computed, cached=cached),
        block_ids=[list(range(first, first + len(table))), list(table)],
    )


def runner_after(*steps: SchedulerOutput) -> NullRunner:
    runner = NullRunner(state_facts())
    for sent in steps:
        runner.execute(sent)
    return runner


FIRST = step(0, 6, [with_states(1, [3, 4])], counts={1: 6})
"""Request 1 leaves its state after 4 tokens in block 3, and after 6 in block 4."""


# Contents ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_kv", [True, False])
@pytest.mark.parametrize("budget", [16, 2048])
@pytest.mark.parametrize("num_states", [2, 5, 60])
@pytest.mark.parametrize("num_blocks", [60, 600])
def test_tokens_are_the_same_however_few_states_there_are(
    num_blocks: int, num_states: int, budget: int, has_kv: bool
) -> None:
    run = drive(
        NullRunner(state_facts(num_states, num_blocks if has_kv else 2, has_kv=has_kv)),
        prompts(),
        PARAMS,
        max_num_batched_tokens=budget,
        mamba_block_size=8,
        max_steps_in_flight=2,
        scheduler_reserve_full_isl=False,
    )
    assert [expected(prompt, 20) for prompt in prompts()] == run.output_token_ids
    assert run.num_cached_tokens > 0 or num_states < 60 or budget == 2048


@pytest.mark.parametrize("num_draft_states", [0, 1, 7, None])
@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_drafts_change_no_token(max_steps_in_flight: int, num_draft_states: int | None) -> None:
    runner = NullRunner(
        state_facts(5, 60), num_speculative_tokens=4, num_draft_states=num_draft_states
    )
    run = drive(
        runner,
        prompts(),
        PARAMS,
        mamba_block_size=8,
        max_steps_in_flight=max_steps_in_flight,
        scheduler_reserve_full_isl=False,
        num_speculative_tokens=4,
        adaptive_speculation=False,
    )
    assert [expected(prompt, 20) for prompt in prompts()] == run.output_token_ids
    assert run.num_accepted_drafts < run.num_drafts or not num_draft_states
    assert bool(run.num_drafts) == (num_draft_states != 0)
    assert run.num_preemptions > 0


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("num_speculative_tokens", [0, 3])
def test_swaps_change_no_token(num_speculative_tokens: int, max_steps_in_flight: int) -> None:
    found = state_facts(5, 60)
    facts_ = msgspec.structs.replace(
        found, num_host_blocks=40, num_host_state_blocks=2, state_swap_blocks=1.0
    )
    run = drive(
        NullRunner(facts_, num_speculative_tokens=num_speculative_tokens),
        prompts(),
        PARAMS,
        mamba_block_size=8,
        max_steps_in_flight=max_steps_in_flight,
        scheduler_reserve_full_isl=False,
        num_speculative_tokens=num_speculative_tokens,
        adaptive_speculation=False,
        swap_cost_tokens=0.01,
    )
    assert [expected(prompt, 20) for prompt in prompts()] == run.output_token_ids
    assert 0 < run.num_swaps <= run.num_preemptions


def test_a_swap_copies_the_state_after_the_last_right_draft() -> None:
    """It is in a block of which the core knows nothing."""
    facts_ = msgspec.structs.replace(state_facts(), num_host_state_blocks=2)
    mirror = Mirror(facts_, 2, num_draft_states=2)
    parts = mirror.apply(FIRST)
    mirror.advance(parts, [5])
    request = mirror.requests[1]
    assert mirror.take_drafts(request, [8, 9]) == 2
    parts = mirror.apply(step(1, 3, counts={1: 3}, grown={1: [[30], [4]]}))
    mirror.advance(parts, [5], [1])
    assert request.state_block == request.draft_states[0] >= facts_.num_state_blocks
    leaving = msgspec.structs.replace(
        step(2, 0, preempted=[1]), state_swap_out=BlockCopies([4], [1])
    )
    begins_from = request.state_block
    mirror.apply(leaving)
    assert mirror.state_swap_out == BlockCopies([begins_from], [1])


@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ({"state_swap_out": BlockCopies([21], [0])}, "state_swap_out got block 21, outside 1 to"),
        ({"state_swap_out": BlockCopies([4], [2])}, "state_swap_out names host block 2 of 2"),
        ({"state_swap_out": BlockCopies([3, 4], [1, 1])}, "state_swap_out copies two blocks"),
        ({"state_swap_in": BlockCopies([4, 4], [0, 1])}, "state_swap_in copies two blocks to one"),
        ({"state_swap_in": BlockCopies([4], [0])}, "host state block 0 is copied and was never"),
        ({"state_swap_out": BlockCopies([9], [0])}, "state_swap_out names 9, of no preempted"),
    ],
)
def test_wrong_copies_of_states_are_refused(copies: dict[str, BlockCopies], message: str) -> None:
    runner = NullRunner(msgspec.structs.replace(state_facts(), num_host_state_blocks=2))
    runner.execute(FIRST)
    with pytest.raises(MirrorError, match=message):
        runner.execute(msgspec.structs.replace(step(1, 1), **copies))


def test_a_snapshot_is_read_by_other_requests_of_the_same_tokens() -> None:
    runner = runner_after(FIRST)
    both = [with_states(2, [3, 5], computed=4), with_states(3, [3, 6], computed=4)]
    runner.execute(step(1, 5, both, counts={2: 2, 3: 2}))


def test_a_block_moves_along_to_the_next_entry() -> None:
    runner = runner_after(FIRST)
    for step_id in range(1, 8):
        grown = {1: [[30 + step_id], [4]]} if step_id in (3, 7) else None
        runner.execute(step(step_id, 1, grown=grown))


def test_a_state_of_other_tokens_is_refused() -> None:
    for table, message in (
        ([4, 5], "request 2 begins after 4 tokens from state block 4, which has 6 other tokens"),
        ([7, 5], "begins after 4 tokens from state block 7, which was never written"),
    ):
        with pytest.raises(MirrorError, match=message):
            runner_after(FIRST).execute(
                step(1, 3, [with_states(2, table, computed=4)], counts={2: 2})
            )
    other = msgspec.structs.replace(with_states(2, [3, 5], computed=4), token_ids=b"\x01\0\0\0" * 6)
    with pytest.raises(MirrorError, match="state block 3, which has 4 other tokens"):
        runner_after(FIRST).execute(step(1, 3, [other], counts={2: 2}))


def test_a_block_of_two_owners_is_found_in_the_next_step() -> None:
    runner = runner_after(FIRST, step(1, 3, [with_states(2, [4], 3)], counts={1: 0, 2: 3}))
    with pytest.raises(MirrorError, match="request 1 begins after 6 tokens from state block 4"):
        runner.execute(step(2, 2))


def test_requests_of_one_step_are_not_ordered() -> None:
    hit = with_states(2, [3, 5], computed=4)
    with pytest.raises(MirrorError, match="state block 3, which was never written"):
        runner_after().execute(step(0, 8, [FIRST.scheduled_new_reqs[0], hit], counts={1: 6, 2: 2}))
    reader, writer = with_states(2, [3, 5], computed=4), with_states(3, [3], 3)
    for news in ([reader, writer], [writer, reader]):
        with pytest.raises(MirrorError, match="state block 3 is written by request 3 and used by"):
            runner_after(FIRST).execute(step(1, 6, news, counts={2: 2, 3: 3}))
    twice = [with_states(2, [5], 3), with_states(3, [5], 3)]
    with pytest.raises(MirrorError, match="state block 5 is written by request 3 and used by"):
        runner_after(FIRST).execute(step(1, 7, twice, counts={2: 3, 3: 3}))


def test_a_block_may_be_written_again_when_its_owner_is_gone() -> None:
    runner = runner_after(FIRST)
    runner.execute(step(1, 6, [with_states(2, [3, 4])], counts={2: 6}, finished=[1]))
    runner.execute(step(2, 6, [with_states(1, [3, 4])], counts={1: 6}, preempted=[2]))


def test_a_sleep_loses_the_states() -> None:
    runner = runner_after(FIRST, step(1, 0, finished=[1]))
    runner.sleep()
    with pytest.raises(MirrorError, match="was never written"):
        runner.execute(step(2, 2, [with_states(1, [3, 4], computed=4)], counts={1: 2}))


# Tables -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (with_states(1, [3, 21]), "got state block 21, outside 0 to 20"),
        (with_states(1, [4, 0]), "got no state block at the end of its table"),
        (with_states(1, [0, 4], computed=4), "has no block for its state after 4 tokens"),
        (with_states(1, [3, 4], computed=4, cached=5), "has a cached token after the state"),
    ],
)
def test_wrong_state_tables_are_refused(request_: NewRequestData, message: str) -> None:
    count = 6 - request_.num_computed_tokens
    with pytest.raises(MirrorError, match=message):
        Mirror(state_facts()).apply(step(0, count, [request_], counts={1: count}))


def test_each_part_of_a_request_ends_in_a_block() -> None:
    mirror = Mirror(state_facts())
    with pytest.raises(MirrorError, match="has no block for its state after 3 tokens"):
        mirror.apply(step(0, 3, [with_states(1, [0, 4])], counts={1: 3}))


def test_growth_brings_a_block_for_the_last_state() -> None:
    mirror = Mirror(state_facts())
    mirror.advance(mirror.apply(FIRST), [5])
    with pytest.raises(MirrorError, match="request 1 got no state block at the end"):
        mirror.apply(step(1, 1, grown={1: [[30], [0]]}))


def test_state_blocks_do_not_count_as_kv_blocks() -> None:
    mirror = Mirror(state_facts())
    mirror.apply(step(0, 6, [with_states(1, [19, 20])], counts={1: 6}))
    assert mirror.highest_block == 11
