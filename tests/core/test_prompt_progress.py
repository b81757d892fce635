"""Rows about the progress of prompts: for requests that ask, in order, and none after a token."""

import pytest

from protocol.api_core import RequestOutput
from protocol.sampling import SamplingParams
from tests.core.pooling_bench import FACTS, Bench
from worker_proc.null.runner import NullRunner

PROMPT = list(range(5, 105))
ASKS = SamplingParams(max_tokens=3, ignore_eos=True, return_progress=True)


def progress(rows: list[RequestOutput]) -> list[int]:
    """Return the reported numbers; all come before the tokens."""
    found = [row.num_computed_tokens for row in rows]
    numbers = [number for number in found if number is not None]
    assert found == [*numbers, *[None] * (len(found) - len(numbers))]
    assert all(row.token_ids == [] and row.first_index == 0 for row in rows[: len(numbers)])
    return numbers


def bench_of(**settings: object) -> Bench:
    return Bench(max_num_batched_tokens=32, max_num_seqs=16, **settings)


@pytest.mark.parametrize("num_speculative_tokens", [0, 2])
def test_each_part_of_a_prompt_is_reported_once_it_is_computed(num_speculative_tokens: int) -> None:
    bench = bench_of(num_speculative_tokens=num_speculative_tokens)
    bench.add(1, PROMPT, ASKS)
    bench.add(2, PROMPT[::-1], SamplingParams(max_tokens=3, ignore_eos=True))
    assert bench.step()
    assert progress(bench.rows[1]) == [32]
    bench.run()
    assert progress(bench.rows[1]) == [32, 64, 96]
    assert progress(bench.rows[2]) == []
    assert sum(len(row.token_ids) for row in bench.rows[1]) == 3
    assert not bench.core.progress._in_flight


def test_cached_tokens_count_and_short_prompts_report_nothing() -> None:
    bench = bench_of()
    bench.add(1, PROMPT[:60], ASKS)
    bench.run()
    bench.add(2, PROMPT, ASKS)
    bench.add(3, [5] * 3, ASKS)
    bench.run()
    assert progress(bench.rows[2])[0] > 48
    assert bench.rows[2][0].num_cached_tokens == 48
    assert progress(bench.rows[3]) == []


def test_a_lost_worker_and_an_abort_leave_no_state() -> None:
    bench = bench_of()
    bench.add(1, PROMPT, ASKS)
    bench.add(2, PROMPT, ASKS)
    bench.step()
    assert bench.core.schedule() is not None  # in flight, and lost
    bench.core.lose_workers()
    bench.runner = NullRunner(FACTS)
    bench.core.adopt_workers(FACTS, 0.001)
    bench.core.abort(b"client", [2])
    bench.run()
    assert progress(bench.rows[1]) == [32, 96]
    assert sum(len(row.token_ids) for row in bench.rows[1]) == 3
    bench.add(3, PROMPT[::-1], ASKS)
    bench.run()
    assert progress(bench.rows[3]) == [32, 64, 96]
    assert not bench.core.progress._in_flight
