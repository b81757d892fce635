"""The fake worker detects a read of wrong KV."""

from collections.abc import Callable, Sequence

import pytest

from protocol.core_worker import (
    BlockCopies,
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from protocol.message import pack_token_ids
from protocol.sampling import SamplingParams
from tests.core.fake_worker import FakeWorker

SIZE, WINDOW = 4, 6
FULL, SLIDING = [1, 2, 3], [4, 5, 6]


def new(
    req_id: int,
    tables: Sequence[list[int]],
    computed: int = 0,
    num_tokens: int = 9,
    first_token: int = 10,
) -> NewRequestData:
    """A request of ascending tokens; requests with the same first token are equal."""
    tokens = pack_token_ids(range(first_token, first_token + num_tokens))
    return NewRequestData(
        req_id, tokens, num_tokens, SamplingParams(), list(tables), computed, computed
    )


def step(
    step_id: int,
    counts: dict[int, int],
    news: Sequence[NewRequestData] = (),
    *,
    grown: dict[int, list[list[int]]] | None = None,
    preempted: Sequence[int] = (),
    out: BlockCopies | None = None,
    into: BlockCopies | None = None,
) -> SchedulerOutput:
    """A step in which the message omits counts of one token."""
    cached = CachedRequestData(list(grown or {}), list((grown or {}).values()))
    named = {req_id: count for req_id, count in counts.items() if count != 1}
    copies = (out or BlockCopies(), into or BlockCopies())
    return SchedulerOutput(
        *(step_id, list(news), cached, named, sum(counts.values())),
        *(list(preempted), [], *copies),
    )


def computed() -> FakeWorker:
    """A worker that has computed 9 tokens of request 1, whose next token sees 4 to 9."""
    worker = FakeWorker(SIZE, 20, lambda req_id, position: 7, (None, WINDOW), num_host_blocks=6)
    worker.execute(step(0, {1: 9}, [new(1, [FULL, SLIDING])]))
    return worker


def read_on(worker: FakeWorker, step_id: int = 1) -> None:
    worker.execute(step(step_id, {1: 1}))


def test_a_block_that_the_window_has_passed_may_be_overwritten() -> None:
    worker = computed()
    other = new(2, [[8], [4]], num_tokens=4, first_token=50)
    worker.execute(step(1, {1: 1, 2: 4}, [other]))


@pytest.mark.parametrize("taken", [1, 5, 6])
def test_a_block_that_is_still_seen_must_not_be_overwritten(taken: int) -> None:
    worker = computed()
    other = new(2, [[8], [taken]], num_tokens=4, first_token=50)
    with pytest.raises(AssertionError):
        worker.execute(step(1, {1: 1, 2: 4}, [other]))


def test_a_block_of_another_group_holds_other_kv() -> None:
    computed().execute(step(1, {1: 1, 2: 1}, [new(2, [FULL, SLIDING], 8)]))
    with pytest.raises(AssertionError):
        computed().execute(step(1, {1: 1, 2: 1}, [new(2, [SLIDING, FULL], 8)]))


def test_null_blocks_stand_where_the_window_has_passed_and_nowhere_else() -> None:
    # Token 9 sees from position 4 on, token 8 from position 3.
    longer = [new(2, [FULL, [0, 5, 6]], 9, num_tokens=10)]
    computed().execute(step(1, {1: 0, 2: 1}, longer))
    for tables, start in (
        ([FULL, [0, 5, 6]], 8),
        ([[0, 2, 3], SLIDING], 9),
        ([FULL, [0, 0, 6]], 9),
    ):
        sent = step(1, {1: 0, 2: 10 - start}, [new(2, tables, start, num_tokens=10)])
        with pytest.raises(AssertionError):
            computed().execute(sent)


def test_a_request_goes_to_the_host_and_comes_back_in_other_blocks() -> None:
    worker = computed()
    worker.execute(
        step(1, {}, preempted=[1], out=BlockCopies([*FULL, *SLIDING[1:]], [4, 3, 2, 1, 0]))
    )
    back = new(1, [[3, 4, 5], [0, 1, 2]], 9, num_tokens=10)
    into = BlockCopies([3, 4, 5, 1, 2], [4, 3, 2, 1, 0])
    worker.execute(step(2, {1: 1}, [back], into=into))


def out_after_in(worker: FakeWorker) -> None:
    worker.execute(step(1, {1: 0}, out=BlockCopies([2], [0])))
    worker.execute(step(2, {1: 0}, into=BlockCopies([9], [0])))
    read_on(worker, 3)
    # Swap-outs come first: host block 0 holds block 3 when it is read for block 2.
    worker.execute(step(4, {1: 1}, out=BlockCopies([3], [0]), into=BlockCopies([2], [0])))


def after_a_sleep(worker: FakeWorker) -> None:
    worker.execute(step(1, {}, preempted=[1]))
    worker.sleep()
    worker.execute(step(2, {1: 1}, [new(1, [FULL, SLIDING], 9, num_tokens=10)]))


def without_copying(worker: FakeWorker) -> None:
    worker.execute(step(1, {1: 1}, into=BlockCopies([3], [2])))


def to_no_block_of_the_host(worker: FakeWorker) -> None:
    worker.execute(step(1, {1: 1}, out=BlockCopies([3], [6])))


def to_the_null_block(worker: FakeWorker) -> None:
    worker.execute(step(1, {1: 1}, out=BlockCopies([3], [5])))
    worker.execute(step(2, {1: 1}, into=BlockCopies([0], [5])))


def asleep_in_company(worker: FakeWorker) -> None:
    worker.sleep()


def unequal_growth(worker: FakeWorker) -> None:
    worker.execute(step(1, {1: 1}, grown={1: [[8], []]}))


@pytest.mark.parametrize(
    "mistake",
    [
        out_after_in,
        after_a_sleep,
        without_copying,
        to_no_block_of_the_host,
        to_the_null_block,
        asleep_in_company,
        unequal_growth,
    ],
)
def test_a_mistake_is_noticed(mistake: Callable[[FakeWorker], None]) -> None:
    read_on(computed())
    with pytest.raises((AssertionError, KeyError)):
        mistake(computed())
