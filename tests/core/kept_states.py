"""Schedulers whose store keeps states of recurrent layers, and a store that is filled."""

from protocol.model_facts import KVGroup
from tests.core.fake_store import FakeStore
from tests.core.state_bench import FULL, STATES, WINDOW
from tests.core.store_bench import BLOCK, Bench

SPACING = 4 * BLOCK
PROMPT = [1000 + i for i in range(10 * BLOCK + 3)]
"""Ten full blocks: states are kept after four, eight and ten."""
ALL_GROUPS = [(FULL,), (FULL, WINDOW), ()]


def make(
    groups: tuple[KVGroup, ...] = (FULL,),
    store: FakeStore | None = None,
    *,
    num_states: int = 8,
    **config: object,
) -> Bench:
    return Bench(
        store,
        kv_groups=(*groups, STATES),
        num_state_blocks=num_states + 1,
        mamba_block_size=SPACING,
        **config,
    )


def fill(groups: tuple[KVGroup, ...] = (FULL,)) -> FakeStore:
    """Return a store with the blocks and states of PROMPT."""
    bench = make(groups)
    bench.add("a", PROMPT, 2)
    bench.step()
    bench.transfer()
    assert bench.offload.num_stored_states == 3
    return bench.store
