"""The null runner: a pure function of the context that checks what it is sent."""

import itertools
import random
import subprocess
import sys

import msgspec
import pytest

from protocol.core_worker import BlockCopies, NewRequestData, SchedulerOutput
from protocol.message import pack_token_ids
from protocol.model_facts import KVGroup, ModelFacts
from protocol.sampling import SamplingParams
from tests.worker.driving import drive
from tests.worker.null.contexts import EOS, PARAMS, expected, facts, prompts
from tests.worker.steps import new, step
from worker_proc.errors import MirrorError
from worker_proc.null.model import draft_token_ids, next_token_id
from worker_proc.null.runner import NullRunner, NullTimes


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("budget", [16, 2048])
@pytest.mark.parametrize("num_blocks", [60, 600])
def test_tokens_are_the_same_however_the_work_is_cut(
    num_blocks: int, budget: int, caching: bool
) -> None:
    run = drive(
        NullRunner(facts(num_blocks)),
        prompts(),
        PARAMS,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        scheduler_reserve_full_isl=False,
    )
    assert [expected(prompt, 20) for prompt in prompts()] == run.output_token_ids
    assert (run.num_preemptions > 0) == (num_blocks == 60)


def test_next_token_depends_on_context_and_position_and_is_not_eos() -> None:
    seen = {next_token_id([*tail], 300, EOS) for tail in itertools.product(range(6), repeat=4)}
    assert len(seen) > 250
    assert 2 not in seen
    assert next_token_id([1, 1, 1, 1], 300, EOS) != next_token_id([1, 1, 1, 1, 1], 300, EOS)
    assert next_token_id([1], 1, [0]) == 0


def test_a_block_that_two_live_requests_write_is_refused() -> None:
    runner = NullRunner(facts())
    runner.execute(step(0, 6, [new(1, 6, [5, 6])], counts={1: 6}))
    with pytest.raises(MirrorError, match="block 6 is written by requests 1 and 2"):
        runner.execute(step(1, 7, [new(2, 6, [7, 6])], counts={2: 6}))


def test_a_block_may_be_written_again_when_its_writer_is_gone() -> None:
    runner = NullRunner(facts())
    runner.execute(step(0, 6, [new(1, 6, [5, 6])], counts={1: 6}))
    runner.execute(step(1, 6, [new(2, 6, [7, 6])], counts={2: 6}, finished=[1]))
    runner.execute(step(2, 7, [new(1, 6, [5, 8])], counts={1: 6}))


def test_a_shared_block_is_read_and_not_written() -> None:
    runner = NullRunner(facts())
    runner.execute(step(0, 6, [new(1, 6, [5, 6])], counts={1: 6}))
    runner.execute(step(1, 3, [new(2, 6, [5, 7], computed=4)], counts={2: 2}))
    # The whole prompt was cached: its last token is computed for its logits alone.
    runner.execute(step(2, 3, [new(3, 4, [5], computed=3, cached=4)], counts={3: 1}))


@pytest.mark.parametrize("num_computed", [1, 2])
def test_a_shared_block_is_not_written_within(num_computed: int) -> None:
    """A request may begin with one token in the middle of a block."""
    runner = NullRunner(facts())
    runner.execute(step(0, 3, [new(1, 3, [5])], counts={1: 3}))
    shared = new(2, num_computed + 1, [5], computed=num_computed)
    with pytest.raises(MirrorError, match="block 5 is written by requests 1 and 2"):
        runner.execute(step(1, 2, [shared]))


def windowed_facts(num_blocks: int = 400) -> ModelFacts:
    groups = [KVGroup(), KVGroup(6, 5)]
    return msgspec.structs.replace(facts(num_blocks), kv_groups=groups, num_host_blocks=9)


@pytest.mark.parametrize("num_blocks", [40, 600])
def test_windows_change_no_token(num_blocks: int) -> None:
    run = drive(
        NullRunner(windowed_facts(num_blocks)),
        prompts(),
        PARAMS,
        max_num_batched_tokens=8,
        scheduler_reserve_full_isl=False,
    )
    assert [expected(prompt, 20) for prompt in prompts()] == run.output_token_ids
    assert (run.num_preemptions > 0) == (num_blocks == 40)


def two_tables(req_id: int, full: list[int], sliding: list[int]) -> NewRequestData:
    return msgspec.structs.replace(new(req_id, 8), block_ids=[full, sliding])


def test_a_block_may_be_written_again_once_the_window_has_passed_it() -> None:
    def decoded(num_tokens: int) -> NullRunner:
        """Compute 8 tokens of a request with blocks 3 and 4 in its window, and some more."""
        runner = NullRunner(windowed_facts())
        runner.execute(step(0, 8, [two_tables(1, [1, 2], [3, 4])], counts={1: 8}))
        for step_id in range(1, 1 + num_tokens):
            grown = {1: [[5], [6]]} if step_id == 1 else {}
            runner.execute(step(step_id, 1, grown=grown))
        return runner

    other = two_tables(2, [7, 8], [3, 9])
    # With 8 tokens computed the next one sees from position 3 on, with 9 from position 4.
    with pytest.raises(MirrorError, match="block 3 is written by requests 1 and 2"):
        decoded(0).execute(step(1, 9, [other], counts={2: 8}, grown={1: [[5], [6]]}))
    decoded(1).execute(step(2, 9, [other], counts={2: 8}))
    in_the_full_group = two_tables(2, [7, 1], [8, 9])
    with pytest.raises(MirrorError, match="block 1 is written by requests 1 and 2"):
        decoded(1).execute(step(2, 9, [in_the_full_group], counts={2: 8}))


def swapping(
    sent: SchedulerOutput, out: BlockCopies | None = None, into: BlockCopies | None = None
) -> SchedulerOutput:
    out, into = out or BlockCopies(), into or BlockCopies()
    return msgspec.structs.replace(sent, swap_out=out, swap_in=into)


def test_a_request_comes_back_from_the_host() -> None:
    runner = NullRunner(windowed_facts())
    runner.execute(step(0, 8, [two_tables(1, [1, 2], [3, 4])], counts={1: 8}))
    runner.execute(swapping(step(1, 0, preempted=[1]), BlockCopies([1, 2, 3, 4], [5, 6, 7, 8])))
    back = msgspec.structs.replace(
        two_tables(1, [2, 1, 9], [4, 3, 8]),
        token_ids=pack_token_ids([*range(10, 18), 50]),
        num_computed_tokens=8,
        num_cached_tokens=8,
    )
    into = BlockCopies([2, 1, 4, 3], [5, 6, 7, 8])
    runner.execute(swapping(step(2, 1, [back]), into=into))
    with pytest.raises(MirrorError, match="block 1 is written by requests 1 and 2"):
        runner.execute(step(3, 9, [two_tables(2, [20, 1], [21, 22])], counts={2: 8}))


def test_a_swapped_in_request_shares_its_blocks_with_one_admitted_in_the_same_step() -> None:
    """The second hits in the prefix cache what the first swaps in and fills in this step."""
    runner = NullRunner(msgspec.structs.replace(facts(block_size=8), num_host_blocks=1))
    tokens = pack_token_ids(range(10, 19))
    first = NewRequestData(1, tokens, 9, PARAMS, [[3]], 0, 0)
    runner.execute(step(0, 7, [first], counts={1: 7}))
    runner.execute(swapping(step(1, 0, preempted=[1]), BlockCopies([3], [0])))
    back = NewRequestData(1, tokens, 9, PARAMS, [[4, 5]], 7, 7)
    other = NewRequestData(2, tokens, 9, PARAMS, [[4, 6]], 8, 8)
    sent = step(2, 3, [back, other], counts={1: 2, 2: 1})
    runner.execute(swapping(sent, into=BlockCopies([4], [0])))


def test_swap_in_fills_blocks_of_arriving_requests_with_what_was_copied_out() -> None:
    arriving = two_tables(2, [5, 6], [7, 8])
    for block_id, host_id, message in (
        (5, 1, "host block 1 was never written"),
        (1, 0, "fills block 1, which no new request holds"),
    ):
        runner = NullRunner(windowed_facts())
        first = step(0, 8, [two_tables(1, [1, 2], [3, 4])], counts={1: 8})
        runner.execute(first)
        runner.execute(swapping(step(1, 0, counts={1: 0}), BlockCopies([1], [0])))
        sent = step(2, 8, [arriving], counts={1: 0, 2: 8})
        with pytest.raises(MirrorError, match=message):
            runner.execute(swapping(sent, into=BlockCopies([block_id], [host_id])))


def test_a_sleep_loses_what_the_host_held() -> None:
    runner = NullRunner(windowed_facts(), NullTimes(swap_cost_tokens=7.0))
    assert runner.swap_cost_tokens == 7.0
    runner.execute(step(0, 8, [two_tables(1, [1, 2], [3, 4])], counts={1: 8}))
    with pytest.raises(MirrorError, match="1 requests are mirrored"):
        runner.sleep()
    runner.execute(swapping(step(1, 0, preempted=[1]), BlockCopies([1], [0])))
    runner.sleep()
    sent = step(2, 8, [two_tables(1, [1, 2], [3, 4])], counts={1: 8})
    with pytest.raises(MirrorError, match="host block 0 was never written"):
        runner.execute(swapping(sent, into=BlockCopies([1], [0])))


def test_logprobs_are_returned_for_requests_that_ask() -> None:
    asking = SamplingParams(max_tokens=3, temperature=0.0, logprobs=2, prompt_logprobs=1)
    runner = NullRunner(facts())
    request = msgspec.structs.replace(new(1), sampling_params=asking)
    output = runner.execute(step(0, 12, [request, new(2)], counts={1: 6, 2: 6}))
    assert list(output.logprobs) == [1]
    assert [output.sampled_token_ids[0]] == [entry.token_id for entry in output.logprobs[1]]
    assert [(p.req_id, p.first_position) for p in output.prompt_logprobs] == [(1, 1)]
    assert [e.token_id for e in output.prompt_logprobs[0].entries] == [11, 12, 13, 14, 15]


NUM_DRAFTS = 3


def test_drafts_are_right_up_to_a_place_that_the_text_decides() -> None:
    rng = random.Random(1)
    seen = set()
    for _ in range(400):
        text = [rng.randrange(300) for _ in range(rng.randrange(1, 30))]
        before = list(text)
        drafts = draft_token_ids(text, NUM_DRAFTS, 300, EOS)
        assert text == before
        assert drafts == draft_token_ids(text, NUM_DRAFTS, 300, EOS)
        right = expected(text, NUM_DRAFTS)
        num_right = next((i for i, d in enumerate(drafts) if d != right[i]), len(drafts))
        seen.add((len(drafts), num_right))
    assert seen == {(m, right) for m in range(NUM_DRAFTS + 1) for right in range(m + 1)}


def test_tokens_are_the_same_over_drafts() -> None:
    asking = SamplingParams(max_tokens=100, temperature=0.0, logprobs=1)
    request = msgspec.structs.replace(new(1, 6, range(1, 50)), sampling_params=asking)
    runner = NullRunner(facts(), num_speculative_tokens=NUM_DRAFTS)
    output = runner.execute(step(0, 6, [request], counts={1: 6}))
    tokens = list(output.sampled_token_ids)
    seen = set()
    for step_id in range(1, 300):
        # Not every step verifies all announced drafts.
        drafted = output.num_draft_tokens[0] if output.num_draft_tokens else 0
        num_drafts = min(drafted, step_id % 4)
        count = num_drafts + 1
        output = runner.execute(step(step_id, count, counts={1: count}))
        assert output.num_sampled_tokens == [len(output.sampled_token_ids)]
        assert [entry.token_id for entry in output.logprobs[1]] == output.sampled_token_ids
        tokens += output.sampled_token_ids
        seen.add((num_drafts, len(output.sampled_token_ids) - 1))
        if len(tokens) > 180:
            break
    assert tokens == expected(list(range(10, 16)), len(tokens))
    assert seen == {(m, right) for m in range(NUM_DRAFTS + 1) for right in range(m + 1)}


def test_without_speculation_nothing_is_announced() -> None:
    output = NullRunner(facts()).execute(step(0, 6, [new(1)], counts={1: 6}))
    assert (output.num_sampled_tokens, output.num_draft_tokens) == ([], [])


def test_a_step_takes_the_configured_time() -> None:
    output = NullRunner(facts(), NullTimes(step_s=0.01)).execute(
        step(0, 6, [new(1)], counts={1: 6})
    )
    assert output.forward_ns >= 10_000_000


def test_the_null_runner_never_imports_torch() -> None:
    code = "import sys, worker_proc.null.runner; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
