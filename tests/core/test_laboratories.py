"""The worked examples of docs/scheduling.md: small workloads that show one rule each.

The five invariants of that page are asserted after both halves of every step, with a test for each
of them that it can fail.
"""

import random
import zlib
from collections.abc import Callable

import msgspec
import pytest

from core_proc.request import Request, RequestStatus
from tests.core.harness import Harness
from tests.paths import DOCS
from tests.tools.scheduling_tables import main

PAGE = DOCS / "scheduling.md"


class Laboratory(Harness):
    """A harness whose samples depend on the context alone; asserts the invariants of the page."""

    def _sample(self, req_id: int, position: int) -> int:
        """Return a token that depends on every token in the worker's mirror."""
        ids = self.worker.mirror[req_id].token_ids
        return 3 + zlib.crc32(bytes(token_id % 251 for token_id in ids)) % 30_000

    def schedule(self) -> dict[str, int]:
        granted = super().schedule()
        self.assert_invariants()
        return granted

    def update(self) -> dict[str, int]:
        tokens = super().update()
        self.assert_invariants()
        return tokens

    def assert_invariants(self) -> None:
        for invariant in INVARIANTS:
            invariant(self)


def _held(request: Request) -> list[int]:
    """Return the blocks of all tables, without the null block."""
    return [block_id for table in request.block_tables for block_id in table if block_id]


def blocks_are_conserved(lab: Harness) -> None:
    """Assert invariant 1: every block is either free or in a table."""
    pool = lab.scheduler.kv.pool
    held = {block_id for request in lab.scheduler.requests.values() for block_id in _held(request)}
    assert held.isdisjoint(pool.free_ids())
    assert len(held) + pool.num_free == pool.num_usable


def no_block_has_two_owners(lab: Harness) -> None:
    """Invariant 2: only a full block is in two tables, and both have the same tokens up to it."""
    size = lab.scheduler.kv.block_size
    prefixes: dict[int, list[int]] = {}
    for request in lab.scheduler.requests.values():
        assert len(_held(request)) == len(set(_held(request)))
        for table in request.block_tables:
            for index, block_id in enumerate(table):
                prefix = request.token_ids[: (index + 1) * size].tolist()
                if block_id and prefixes.setdefault(block_id, prefix) is not prefix:
                    assert prefixes[block_id] == prefix, "two requests write one block"
                    assert len(prefix) == (index + 1) * size, "a block that is not full is shared"


def the_budget_holds(lab: Harness) -> None:
    """Invariant 3: no step has more tokens than its budget."""
    budget = lab.scheduler.options.token_budget
    assert all(step.total_num_scheduled_tokens <= budget for step in lab.sent[-1:])


def the_slots_hold(lab: Harness) -> None:
    """Invariant 4: at most as many requests run as there are slots, and each runs once."""
    req_ids = [request.req_id for request in lab.scheduler.running]
    assert len(req_ids) == len(set(req_ids)) <= lab.scheduler.options.max_num_seqs


def all_end_once(lab: Harness) -> None:
    """Invariant 5: every accepted request is open or has ended, never both and never neither.

    The harness asserts that a request ends once when it processes results.
    """
    for request in lab.requests.values():
        assert (request.req_id in lab.scheduler.requests) != request.is_finished
    reported = {name for name, request in lab.requests.items() if request.status in REPORTED}
    assert set(lab.finished) == reported


REPORTED = {RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED}
INVARIANTS = (
    blocks_are_conserved,
    no_block_has_two_owners,
    the_budget_holds,
    the_slots_hold,
    all_end_once,
)


# The two phases and their bounds ------------------------------------------------------------------


def test_the_budget_is_clamped_in_order_eight_and_two_and_none() -> None:
    lab = Laboratory(budget=10)
    for name in "abc":
        lab.add(name, 8)
    assert lab.step() == {"a": 8, "b": 2}
    assert lab.step() == {"a": 1, "b": 6, "c": 3}


def test_four_slots_admit_four_of_ten() -> None:
    lab = Laboratory(seqs=4)
    for name in "abcdefghij":
        lab.add(name, 10)
    assert lab.step() == dict.fromkeys("abcd", 10)
    assert lab.scheduler.num_waiting == 6


def test_a_threshold_of_sixteen_grants_sixteen_of_a_hundred() -> None:
    lab = Laboratory(long_prefill_token_threshold=16)
    lab.add("a", 100, 1)
    assert lab.steps(7) == [{"a": 16}] * 6 + [{"a": 4}]


def test_running_requests_are_served_before_waiting_ones() -> None:
    lab = Laboratory(budget=16)
    lab.add("a", 12, 5)
    lab.step()
    lab.add("b", 40, 2)
    assert lab.steps(3) == [{"a": 1, "b": 15}, {"a": 1, "b": 15}, {"a": 1, "b": 10}]


def test_exhausted_memory_stops_admission_and_is_not_an_error() -> None:
    lab = Laboratory(blocks=6)
    lab.add("a", 40, 3)
    lab.step()
    lab.add("b", 64, 1)
    lab.add("c", 10, 3)
    assert lab.steps(3) == [{"a": 1}, {"a": 1}, {"b": 64, "c": 10}]
    assert lab.scheduler.num_preemptions == 0
    lab.run()
    assert set(lab.finished.values()) == {"length"}


# Chunks, preemption, caching: when, never what ----------------------------------------------------


def outputs_of(**settings: object) -> tuple[dict[str, list[int]], int]:
    """Return the outputs of three prompts, and the number of preemptions."""
    lab = Laboratory(**settings)  # type: ignore[arg-type]
    for name, length in (("a", 120), ("b", 30), ("c", 50)):
        lab.add(name, length, 24)
    lab.run()
    assert lab.num_free == lab.scheduler.kv.pool.num_usable
    assert lab.worker.mirror == {}
    return lab.outputs, lab.scheduler.num_preemptions


@pytest.mark.parametrize(
    "cut",
    [
        {"budget": 64},
        {"budget": 7},
        {"long_prefill_token_threshold": 20},
        {"seqs": 1},
        {"depth": 2},
        {"caching": True, "budget": 16},
    ],
)
def test_cuts_change_when_tokens_come_and_never_which(cut: dict[str, object]) -> None:
    whole, _ = outputs_of()
    assert outputs_of(**cut) == (whole, 0)
    assert {len(tokens) for tokens in whole.values()} == {24}


@pytest.mark.parametrize("caching", [True, False])
def test_who_is_preempted_ends_with_the_same_tokens(caching: bool) -> None:
    roomy, _ = outputs_of(caching=caching)
    tight, num_preemptions = outputs_of(caching=caching, blocks=15, max_model_len=160)
    assert num_preemptions > 0
    assert tight == roomy


@pytest.mark.parametrize(("caching", "computed"), [(False, 544), (True, 96)])
def test_a_shared_prefix_saves_exactly_its_full_blocks(caching: bool, computed: int) -> None:
    lab = Laboratory(caching=caching)
    shared = list(range(64))
    for index in range(8):
        lab.add(str(index), shared + [1000 + 10 * index + i for i in range(4)], 1)
    lab.run()
    assert lab.worker.total_scheduled == computed
    assert lab.scheduler.num_prefix_hits == 544 - computed


def tokens_while_a_prompt_arrives(threshold: int) -> list[int]:
    lab = Laboratory(long_prefill_token_threshold=threshold)
    lab.add("d", 16, 40)
    lab.step()
    lab.add("p", 256, 20)
    steps = lab.steps(12)
    assert all(step["d"] == 1 for step in steps), "a decoding request has a token in every step"
    return [sum(step.values()) for step in steps]


def test_a_long_prompt_makes_one_long_step_for_all_who_decode() -> None:
    assert tokens_while_a_prompt_arrives(0) == [257] + [2] * 11


def test_the_threshold_caps_that_step_and_adds_steps_instead() -> None:
    assert tokens_while_a_prompt_arrives(32) == [33] * 8 + [2] * 4


# The five invariants ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
def test_the_invariants_hold_after_every_step_of_a_crowded_scheduler(seed: int) -> None:
    rng = random.Random(seed)
    lab = Laboratory(
        blocks=16,
        seqs=rng.choice([2, 5]),
        budget=rng.choice([9, 40, 500]),
        caching=seed % 2 == 0,
        depth=rng.choice([1, 2]),
        policy=rng.choice(["fcfs", "priority"]),
        long_prefill_token_threshold=rng.choice([0, 15]),
    )
    shared = list(range(40))
    for index in range(25):
        own = [500 + 100 * index + i for i in range(rng.randint(1, 60))]
        prompt = shared + own if rng.random() < 0.5 else own
        lab.add(str(index), prompt, rng.randint(1, 40), priority=rng.randint(0, 2))
        for _ in range(rng.randint(0, 3)):
            lab.step()
        if rng.random() < 0.2:
            lab.abort(str(rng.randint(0, index)))
    lab.run()
    assert all(request.is_finished for request in lab.requests.values())
    assert lab.num_free == lab.scheduler.kv.pool.num_usable


def _leak_a_block(lab: Laboratory) -> None:
    lab.scheduler.kv.pool.allocate(1)


def _give_a_block_twice(lab: Laboratory) -> None:
    a, b = lab.requests["a"], lab.requests["b"]
    b.block_tables[0][-1] = a.block_tables[0][-1]


def _overspend(lab: Laboratory) -> None:
    num_tokens = lab.scheduler.options.token_budget + 1
    lab.sent.append(msgspec.structs.replace(lab.sent[-1], total_num_scheduled_tokens=num_tokens))


def _run_one_too_many(lab: Laboratory) -> None:
    lab.scheduler.running.append(lab.requests["c"])


def _lose_a_request(lab: Laboratory) -> None:
    del lab.scheduler.requests[lab.requests["c"].req_id]


FAULTS = (
    _leak_a_block,
    _give_a_block_twice,
    _overspend,
    _run_one_too_many,
    _lose_a_request,
)


@pytest.mark.parametrize(("invariant", "fault"), list(zip(INVARIANTS, FAULTS, strict=True)))
def test_every_invariant_can_fail(
    invariant: Callable[[Laboratory], None], fault: Callable[[Laboratory], None]
) -> None:
    lab = Laboratory(seqs=2)
    for name in "abc":
        lab.add(name, 20)
    lab.step()
    invariant(lab)
    fault(lab)
    with pytest.raises(AssertionError):
        invariant(lab)


# The page -----------------------------------------------------------------------------------------


def test_the_page_has_the_tables_that_the_command_prints(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main() == 0
    printed = capsys.readouterr().out
    _, _, rest = PAGE.read_text().partition("<!-- tables -->\n")
    on_page, end, _ = rest.partition("<!-- end of tables -->")
    assert end
    assert on_page.strip() == printed.strip(), "run python -m tests.tools.scheduling_tables"
