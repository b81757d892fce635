"""Kept states of recurrent layers in stores: a load brings one, and the KV up to its position.

The fake worker checks every state that a request begins from. Blocks have 16 tokens.
"""

import pytest

from core_proc.kv.block_pool import BlockPool
from core_proc.kv.offload import Offload
from core_proc.request import RequestStatus
from protocol.core_worker import StoreBlocks
from protocol.model_facts import KVGroup
from tests.core.kept_states import ALL_GROUPS, PROMPT, SPACING, fill, make
from tests.core.store_bench import BLOCK, check_that_a_load_waits_for_the_end_of_another


@pytest.mark.parametrize("groups", ALL_GROUPS, ids=len)
def test_a_state_is_read_with_the_kv_up_to_it(groups: tuple[KVGroup, ...]) -> None:
    bench = make(groups, fill(groups))
    bench.add("a", PROMPT, 2)
    assert bench.step() == {}
    assert bench.requests["a"].status is RequestStatus.WAITING_FOR_REMOTE_KV
    bench.transfer()
    bench.answer()
    assert bench.step() == {"a": 3}
    assert bench.offload.num_loaded_states == 1
    assert bench.offload.num_loaded_tokens == 10 * BLOCK
    bench.run()
    bench.transfer()
    assert bench.offload.num_stored == bench.offload.num_stored_states == 0


def test_the_load_ends_at_the_last_state_that_fits_the_text() -> None:
    """After the blocks of another text behind it there is no state of this one."""
    bench = make(store=fill())
    bench.add("a", PROMPT[: 9 * BLOCK + 5], 2)
    bench.step()
    bench.transfer()
    assert len(bench.loads[0].keys) == 8
    bench.answer()
    assert bench.step() == {"a": BLOCK + 5}
    bench.run()


def test_a_state_of_other_tokens_is_never_read() -> None:
    """One of the first tokens differs: every name behind it does."""
    bench = make(store=fill())
    bench.add("a", [999, *PROMPT[1:]], 2)
    assert bench.step() == {"a": len(PROMPT)}
    bench.run()


def test_without_its_state_no_kv_is_read_and_it_is_not_looked_for_again() -> None:
    bench = make(store=fill())
    bench.add("a", PROMPT, 2)
    bench.step()
    bench.transfer()
    key = bench.loads[0].state_key
    bench.answer(most=0, has_state=False)
    assert bench.step() == {"a": len(PROMPT)}
    assert bench.offload.num_loaded_tokens == 0
    assert key not in bench.store.index
    bench.transfer()
    assert bench.offload.num_stored_states == 1  # it is written again
    bench.run()


def test_kv_that_is_missing_before_the_state_is_computed() -> None:
    """The states before the gap are of use for the next request."""
    bench = make(store=fill())
    bench.add("a", PROMPT, 2)
    bench.step()
    bench.transfer()
    bench.answer(most=6)
    assert bench.step() == {"a": len(PROMPT)}
    assert bench.offload.num_loaded_tokens == 0
    bench.run()


def test_only_the_state_is_read_where_the_kv_is_cached() -> None:
    """There is one state block, which another request has taken meanwhile."""
    bench = make(store=fill(), num_states=1)
    bench.add("a", PROMPT, 2)
    bench.step()
    bench.transfer()
    bench.answer()
    bench.run()
    bench.add("other", 20, 2)
    bench.run()
    bench.add("b", PROMPT, 2)
    bench.step()
    bench.transfer()
    (load,) = bench.loads
    assert (load.keys, load.state_block_id) == ([], 1)
    bench.answer()
    assert bench.step() == {"b": 3}
    bench.run()


def test_a_state_is_stored_before_the_next_step_takes_its_block() -> None:
    """There is one block beside that of the request, for states after four and ten blocks."""
    bench = make(num_states=2, budget=SPACING)
    bench.add("a", PROMPT, 1)
    stored: list[bytes] = []
    while bench.requests["a"].num_computed_tokens < len(PROMPT):
        bench.step()
        for message in bench.scheduler.take_transfers():
            assert isinstance(message, StoreBlocks)
            bench.store.write(bench.worker, message)
            stored += message.state_keys
    hashes = bench.requests["a"].block_hashes
    assert [key[:-1] for key in stored] == [hashes[3], hashes[9]]


def test_a_load_waits_for_a_state_block() -> None:
    bench = make(store=fill(), num_states=1)
    check_that_a_load_waits_for_the_end_of_another(bench, PROMPT)


@pytest.mark.parametrize("ends", ["abort", "lose"])
def test_a_request_may_end_or_lose_its_worker_while_its_state_is_read(ends: str) -> None:
    bench = make(store=fill())
    bench.add("a", PROMPT, 2)
    bench.step()
    bench.transfer()
    if ends == "abort":
        bench.abort("a")
        bench.answer()
    else:
        bench.lose_worker()
        bench.loads.clear()
        bench.step()
        bench.transfer()
        bench.answer()
        assert bench.step() == {"a": 3}
    bench.run()
    assert bench.scheduler.kv.states is not None
    assert bench.scheduler.kv.states.usage == 0.0


def test_a_state_whose_block_was_taken_meanwhile_is_not_stored() -> None:
    pool, states = BlockPool(4), BlockPool(2)
    offload = Offload([set()])
    (block_id,) = states.allocate(1)
    states.remember(block_id, b"one")
    offload.state_cached(block_id, b"one")
    states.free([block_id])
    assert states.allocate(1) == [block_id]
    assert offload.take_messages(pool, states) == []
