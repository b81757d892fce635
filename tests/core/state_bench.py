"""A scheduler with state blocks, and views of the tables of its requests.

The fake worker checks every state that a request begins from, and that no request writes to a
block that another one uses in the same step. Blocks have 16 tokens.
"""

from typing import Any

from core_proc.kv.state_blocks import StateBlocks
from protocol.core_worker import NULL_BLOCK
from protocol.model_facts import KVGroup
from tests.core.harness import PLAIN_TOKEN, Harness

FULL = KVGroup()
STATES = KVGroup(is_state=True)
WINDOW = KVGroup(window=32, max_blocks=7)
WRONG = PLAIN_TOKEN + 1


def make(
    num_states: int,
    *,
    spacing: int = 64,
    groups: tuple[KVGroup, ...] = (FULL,),
    caching: bool = True,
    **options: Any,
) -> Harness:
    """Return a scheduler with this many usable state blocks."""
    return Harness(
        kv_groups=(*groups, STATES),
        num_state_blocks=num_states + 1,
        mamba_block_size=spacing,
        caching=caching,
        **options,
    )


def states(bench: Harness) -> StateBlocks:
    found = bench.scheduler.kv.states
    assert found is not None
    return found


def state_table(bench: Harness, name: str) -> list[int]:
    return bench.requests[name].block_tables[-1]


def sent_table(bench: Harness, step: int = -1) -> list[int]:
    """Return the state table of the only request that a step has introduced."""
    (new,) = bench.sent[step].scheduled_new_reqs
    return new.block_ids[-1]


def entries(table: list[int]) -> list[int]:
    """Return the entries that hold a block."""
    return [index for index, block_id in enumerate(table) if block_id != NULL_BLOCK]


def cached(bench: Harness, name: str) -> int | None:
    return bench.requests[name].num_cached_tokens


def make_drafting(
    num_states: int, drafts: dict[int, list[int]], *, most: int = 8, **options: Any
) -> Harness:
    """Return a scheduler whose worker has these drafts of "a", by its number of outputs."""
    settings = {"num_speculative_tokens": most, "adaptive_speculation": False}
    return make(num_states, guesses={"a": drafts}, **settings, **options)
