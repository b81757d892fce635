"""The mirror follows the rules of the link, and stops at the first step that breaks one."""

import msgspec
import pytest

from protocol.core_worker import BlockCopies, CachedRequestData, NewRequestData, SchedulerOutput
from protocol.model_facts import KVGroup, ModelFacts
from protocol.sampling import SamplingParams
from tests.worker.steps import BLOCK_SIZE, new, step
from worker_proc.errors import MirrorError
from worker_proc.mirror import Mirror
from worker_proc.sampling.row_edits import TokenCounts

FACTS = ModelFacts(
    model="none",
    vocab_size=100,
    max_model_len=50,
    block_size=BLOCK_SIZE,
    num_gpu_blocks=100,
    eos_token_ids=[],
    num_host_blocks=5,
)


def make_mirror() -> Mirror:
    return Mirror(FACTS)


def test_a_steady_decode_step_names_no_request() -> None:
    mirror = make_mirror()
    parts = mirror.apply(step(7, 12, [new(1), new(2)], counts={1: 6, 2: 6}))
    assert [(p.request.req_id, p.start, p.num_tokens, p.samples) for p in parts] == [
        (1, 0, 6, True),
        (2, 0, 6, True),
    ]
    mirror.advance(parts, [91, 92])
    parts = mirror.apply(step(8, 2))
    assert [(p.request.req_id, p.start, p.num_tokens, p.samples) for p in parts] == [
        (1, 6, 1, True),
        (2, 6, 1, True),
    ]
    assert [p.request.token_ids[-1] for p in parts] == [91, 92]


def test_only_the_last_chunk_samples() -> None:
    mirror = make_mirror()
    parts = mirror.apply(step(0, 4, [new(1)], counts={1: 4}))
    assert [p.samples for p in parts] == [False]
    mirror.advance(parts, [])
    parts = mirror.apply(step(1, 2, counts={1: 2}))
    assert [(p.start, p.num_tokens, p.samples) for p in parts] == [(4, 2, True)]


def test_a_request_sits_out_at_zero_tokens() -> None:
    mirror = make_mirror()
    mirror.advance(mirror.apply(step(0, 12, [new(1), new(2)], counts={1: 6, 2: 6})), [5, 6])
    parts = mirror.apply(step(1, 1, counts={1: 0}))
    assert [p.request.req_id for p in parts] == [2]


def test_leaving_comes_before_arriving() -> None:
    mirror = make_mirror()
    mirror.advance(mirror.apply(step(0, 12, [new(1), new(2)], counts={1: 6, 2: 6})), [5, 6])
    parts = mirror.apply(step(1, 6, [new(1)], counts={1: 6}, preempted=[1], finished=[2]))
    assert [(p.request.req_id, p.start) for p in parts] == [(1, 0)]


def test_tables_grow_by_deltas() -> None:
    mirror = make_mirror()
    mirror.advance(mirror.apply(step(0, 8, [new(1, 8)], counts={1: 8})), [5])
    parts = mirror.apply(step(1, 1, grown={1: [[77]]}))
    assert list(map(list, parts[0].request.block_tables)) == [[11, 12, 77]]


def test_the_highest_block_is_known_however_it_came() -> None:
    mirror = make_mirror()
    scheduled = mirror.apply(step(0, 6, [new(0, blocks=[7, 3])], counts={0: 6}))
    assert mirror.highest_block == 7
    mirror.advance(scheduled, [50])
    mirror.apply(step(1, 1, grown={0: [[12]]}))
    assert mirror.highest_block == 12
    assert mirror.move_on(step(2, 1, grown={0: [[20]]}))
    assert mirror.highest_block == 20
    swapped = step(3, 1, [new(1, blocks=[31, 30], computed=5)], counts={1: 1}, finished=[0])
    mirror.apply(msgspec.structs.replace(swapped, swap_in=BlockCopies([31], [0])))
    assert mirror.highest_block == 31
    mirror.reset()
    assert mirror.highest_block == 31  # the next core's requests use the same memory
    mirror.forget_blocks()
    assert mirror.highest_block == 0


def test_reset_forgets_requests_and_steps() -> None:
    mirror = make_mirror()
    mirror.apply(step(5, 6, [new(1)], counts={1: 6}))
    mirror.reset()
    assert not mirror.requests
    mirror.apply(step(0, 6, [new(1)], counts={1: 6}))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (step(9, 1), "step_id 9 came instead of 1"),
        (step(1, 7, [new(1)], counts={1: 6}), "mirrored already"),
        (step(1, 1, preempted=[8]), "preempted_req_ids names 8"),
        (step(1, 1, finished=[8]), "finished_req_ids names 8"),
        (step(1, 1, grown={8: [[3]]}), "scheduled_cached_reqs names 8"),
        (step(1, 1, counts={8: 1}), "num_scheduled_tokens names 8"),
        (step(1, 2), "total_num_scheduled_tokens is 2"),
        (step(1, 2, counts={1: 2}), "position 8 of 7 known tokens"),
        (step(1, 1, grown={1: [[0]]}), "block 0, outside 1 to 99"),
        (step(1, 1, grown={1: [[100]]}), "block 100, outside 1 to 99"),
        (step(1, 9, [new(2, 8, [1])], counts={2: 8}), "position 8 with 1 blocks of 4"),
        (step(1, 7, [new(2, 6, computed=6)], counts={2: 6}), "all of its 6 tokens computed"),
        (step(1, 7, [new(2, 6, cached=2)], counts={2: 6}), "2 cached tokens and 0 computed"),
        (step(1, 52, [new(2, 51)], counts={2: 51}), "max_model_len 50"),
    ],
)
def test_a_broken_rule_stops_the_mirror(broken: SchedulerOutput, message: str) -> None:
    mirror = make_mirror()
    mirror.advance(mirror.apply(step(0, 6, [new(1)], counts={1: 6})), [5])
    with pytest.raises(MirrorError, match=message):
        mirror.apply(broken)


def copies(*pairs: tuple[int, int]) -> BlockCopies:
    return BlockCopies([block_id for block_id, _ in pairs], [host_id for _, host_id in pairs])


def test_copies_are_taken_between_the_pool_and_the_host() -> None:
    broken = msgspec.structs.replace(step(0, 0), swap_out=copies((1, 0), (99, 4)))
    make_mirror().apply(msgspec.structs.replace(broken, swap_in=copies((5, 0), (6, 0))))


@pytest.mark.parametrize("field", ["swap_out", "swap_in"])
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (copies((0, 1)), "got block 0, outside 1 to 99"),
        (copies((100, 1)), "got block 100, outside 1 to 99"),
        (copies((1, 5)), "names host block 5 of 5"),
        (BlockCopies([1, 2], [1]), "differ in length"),
        (copies((3, 1), (3, 1)), "two blocks to one"),
    ],
)
def test_copies_out_of_bounds_are_refused(wrong: BlockCopies, message: str, field: str) -> None:
    broken = msgspec.structs.replace(step(0, 0), **{field: wrong})
    with pytest.raises(MirrorError, match=f"{field}.*{message}"):
        make_mirror().apply(broken)


WINDOWED = msgspec.structs.replace(FACTS, kv_groups=[KVGroup(), KVGroup(6, 4)])


def with_tables(tables: list[list[int]], computed: int) -> NewRequestData:
    return msgspec.structs.replace(new(1, 20, computed=computed), block_ids=tables)


def test_null_blocks_stand_where_the_window_has_passed_and_nowhere_else() -> None:
    full = [1, 2, 3, 4, 5]
    # Token 13 sees from position 8 on, which begins the third block; token 12 sees position 7.
    Mirror(WINDOWED).apply(step(0, 7, [with_tables([full, [0, 0, 8, 9, 7]], 13)], counts={1: 7}))
    for tables, computed in (
        ([full, [0, 0, 8, 9, 7]], 12),
        ([full, [0, 0, 0, 9, 7]], 13),
        ([[0, 2, 3, 4, 5], full], 13),
    ):
        with pytest.raises(MirrorError, match="got block 0"):
            Mirror(WINDOWED).apply(step(0, 7, [with_tables(tables, computed)], counts={1: 7}))


def test_groups_have_tables_of_equal_length() -> None:
    for tables in ([[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5], [6, 7, 8, 9]], []):
        with pytest.raises(MirrorError, match="instead of 2 equal ones"):
            Mirror(WINDOWED).apply(step(0, 20, [with_tables(tables, 0)], counts={1: 20}))
    mirror = Mirror(WINDOWED)
    tables = [[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]]
    mirror.advance(mirror.apply(step(0, 20, [with_tables(tables, 0)], counts={1: 20})), [5])
    with pytest.raises(MirrorError, match="instead of 2 equal ones"):
        mirror.apply(step(1, 1, grown={1: [[11], []]}))


def test_only_an_empty_mirror_may_sleep() -> None:
    mirror = make_mirror()
    mirror.check_empty()
    mirror.advance(mirror.apply(step(0, 6, [new(1)], counts={1: 6})), [5])
    with pytest.raises(MirrorError, match="1 requests are mirrored"):
        mirror.check_empty()
    mirror.apply(step(1, 0, preempted=[1]))
    mirror.check_empty()


def test_columns_of_unequal_length_are_refused() -> None:
    mirror = make_mirror()
    broken = SchedulerOutput(0, [], CachedRequestData([1], []), {}, 0, [], [])
    with pytest.raises(MirrorError, match="differ in length"):
        mirror.apply(broken)


def test_tokens_outside_the_vocabulary_are_refused() -> None:
    mirror = Mirror(msgspec.structs.replace(FACTS, vocab_size=12))
    with pytest.raises(MirrorError, match="vocab_size 12"):
        mirror.apply(step(0, 6, [new(1)], counts={1: 6}))


def test_as_many_tokens_as_requests_that_sample() -> None:
    mirror = make_mirror()
    parts = mirror.apply(step(0, 6, [new(1)], counts={1: 6}))
    with pytest.raises(MirrorError, match="more tokens"):
        mirror.advance(parts, [1, 2])


def drafting(num_drafts: int = 3, blocks: int = 3) -> Mirror:
    """Request 1 with seven tokens, six of them computed, and drafts 71, 72, ..."""
    mirror = make_mirror()
    request = new(1, blocks=range(1, 1 + blocks))
    mirror.advance(mirror.apply(step(0, 6, [request], counts={1: 6})), [61])
    mirror.requests[1].draft_token_ids = list(range(71, 71 + num_drafts))
    return mirror


@pytest.mark.parametrize("num_right", [0, 1, 2])
def test_computed_tokens_return_to_the_last_right_draft(num_right: int) -> None:
    mirror = drafting()
    parts = mirror.apply(step(1, 3, counts={1: 3}))
    assert [(p.start, p.end, p.num_drafts, p.samples) for p in parts] == [(6, 9, 2, True)]
    sampled = [*range(71, 71 + num_right), 5]
    mirror.advance(parts, sampled, [num_right + 1])
    request = mirror.requests[1]
    assert request.token_ids[6:] == [61, *sampled]
    assert request.num_computed_tokens == 7 + num_right == len(request.token_ids) - 1


def test_requests_without_drafts_advance_in_steps_with_drafts() -> None:
    mirror = drafting()
    news = [new(2), new(3, 8)]
    parts = mirror.apply(step(1, 14, news, counts={1: 4, 2: 6, 3: 4}))
    assert [(p.num_drafts, p.samples) for p in parts] == [(3, True), (0, True), (0, False)]
    mirror.advance(parts, [71, 9, 8], [2, 1])
    found = [(r.num_computed_tokens, r.token_ids[-1]) for r in mirror.requests.values()]
    assert found == [(8, 9), (6, 8), (4, 17)]


def test_edits_count_sampled_tokens_alone() -> None:
    """With drafts or without, it is as if the edits were made now."""
    mirror, params = make_mirror(), SamplingParams(presence_penalty=0.5)
    request = msgspec.structs.replace(new(1, blocks=range(1, 4)), sampling_params=params)
    mirror.advance(mirror.apply(step(0, 6, [request], counts={1: 6})), [61])
    mirror.requests[1].draft_token_ids = [61, 62, 63]
    mirror.advance(mirror.apply(step(1, 4, counts={1: 4})), [61, 10], [2])
    found = mirror.requests[1]
    assert found.edits is not None
    assert found.edits.token_counts is not None
    counts = found.edits.token_counts
    fresh = TokenCounts(found.token_ids, found.num_prompt_tokens)
    assert (counts.ids, counts.counts) == (fresh.ids, fresh.counts)
    assert counts.num_tokens == fresh.num_tokens == 9
    assert dict(zip(counts.ids, counts.counts, strict=True))[61] == 2


@pytest.mark.parametrize(
    ("count", "num_drafts", "message"),
    [
        (5, 3, "position 11 of 7 known tokens and 3 drafts"),
        (2, 0, "position 8 of 7 known tokens"),
        (7, 9, "position 13 with 3 blocks of 4"),
    ],
)
def test_no_more_is_scheduled_than_was_guessed(count: int, num_drafts: int, message: str) -> None:
    with pytest.raises(MirrorError, match=message):
        drafting(num_drafts).apply(step(1, count, counts={1: count}))


def test_drafts_end_with_the_models_length() -> None:
    mirror = drafting(45, blocks=20)
    mirror.apply(step(1, 44, counts={1: 44}))
    with pytest.raises(MirrorError, match="position 51, past max_model_len 50"):
        drafting(45, blocks=20).apply(step(1, 45, counts={1: 45}))


@pytest.mark.parametrize(
    ("sampled", "counts", "message"),
    [
        ([71, 72, 73, 5], [4], "sampled 4 tokens over 2 drafts"),
        ([], [0], "sampled 0 tokens over 2 drafts"),
        ([71, 5], [1], "add up to 1"),
        ([71, 5], [1, 1], "2 requests sampled, and 1 were scheduled to"),
    ],
)
def test_sampled_tokens_fit_the_drafts(sampled: list[int], counts: list[int], message: str) -> None:
    mirror = drafting()
    parts = mirror.apply(step(1, 3, counts={1: 3}))
    with pytest.raises(MirrorError, match=message):
        mirror.advance(parts, sampled, counts)


def limited(limits: dict[int, int]) -> SchedulerOutput:
    return msgspec.structs.replace(step(1, 1), draft_limits=limits)


def test_draft_limits_hold_until_they_change() -> None:
    """A new request begins with the most, and one for a vector gets none."""
    mirror = Mirror(FACTS, 3)
    mirror.apply(step(0, 6, [new(1)], counts={1: 6}))
    assert mirror.requests[1].draft_limit == 3
    mirror.requests[1].token_ids.append(61)
    mirror.requests[1].num_computed_tokens = 6
    mirror.apply(limited({1: 0}))
    assert mirror.requests[1].draft_limit == 0


@pytest.mark.parametrize(
    ("limits", "message"),
    [({8: 1}, "draft_limits names 8"), ({1: 4}, "4 drafts, more than num_speculative_tokens 3")],
)
def test_draft_limits_out_of_bounds_are_refused(limits: dict[int, int], message: str) -> None:
    mirror = Mirror(FACTS, 3)
    mirror.apply(step(0, 6, [new(1)], counts={1: 6}))
    with pytest.raises(MirrorError, match=message):
        mirror.apply(limited(limits))
