"""The core looks at the stores of all ranks: a block is of use if none of them lacks it."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from core_proc.kv.offload import Offload
from core_proc.kv.stores import open_stores
from protocol.config.settings import configure
from protocol.model_facts import STAGE_SEPARATOR, ModelFacts
from protocol.stores.index import BlockIndex
from protocol.stores.tiers import blocks_directory, index_path, make_private, tiers

LAYOUT = "a-layout"
FACTS = ModelFacts("null", 1000, 4096, 16, 512, [], kv_layout=LAYOUT)
EVERYWHERE, AT_RANK_0, AT_RANK_1, NOWHERE = (bytes([number] * 32) for number in range(4))


def open_ranks(
    tmp_path: Path, num_ranks: int, *, stages: Sequence[str] = (LAYOUT,)
) -> tuple[list[BlockIndex], Offload]:
    """Return the index of each rank, as the workers make them, and the core's view of them.

    `num_ranks` divide each of the stages, of which the layouts are given.
    """
    config = configure(
        model="null",
        kv_offload_dir=str(tmp_path / "blocks"),
        run_dir=str(tmp_path),
        tensor_parallel_size=num_ranks,
        pipeline_parallel_size=len(stages),
    )
    (tier,) = tiers(config)
    indexes = []
    for rank in range(num_ranks * len(stages)):
        layout = stages[rank // num_ranks]
        make_private(tier.private_directory(layout))
        blocks_directory(tier, layout, rank).mkdir()
        indexes.append(BlockIndex(index_path(tier, layout, rank), max_blocks=100))
    names = STAGE_SEPARATOR.join(dict.fromkeys(stages))
    offload = open_stores(config, msgspec.structs.replace(FACTS, kv_layout=names))
    assert offload is not None
    return indexes, offload


def test_a_block_that_one_rank_lacks_is_not_there(tmp_path: Path) -> None:
    indexes, offload = open_ranks(tmp_path, 2)
    for index, only_here in zip(indexes, (AT_RANK_0, AT_RANK_1), strict=True):
        index.add(EVERYWHERE)
        index.add(only_here)
    keys = (EVERYWHERE, AT_RANK_0, AT_RANK_1, NOWHERE)
    assert [offload.has(key, 0) for key in keys] == [True, False, False, False]


@pytest.mark.parametrize("stages", [("one", "two", "three"), ("one", "one", "one")])
def test_stages_may_have_different_layouts(stages: Sequence[str], tmp_path: Path) -> None:
    """One may have no attention, for example, or another decoder."""
    indexes, offload = open_ranks(tmp_path, 2, stages=stages)
    assert len(indexes) == 6
    for index in indexes:
        assert not offload.has(EVERYWHERE, 0)
        index.add(EVERYWHERE)
    assert offload.has(EVERYWHERE, 0)


def test_all_ranks_forget_what_is_cleared(tmp_path: Path) -> None:
    indexes, offload = open_ranks(tmp_path, 2)
    for index in indexes:
        index.add(EVERYWHERE)
    offload.clear()
    assert not any(EVERYWHERE in index for index in indexes)


def test_of_one_rank_its_own_index_decides(tmp_path: Path) -> None:
    (index,), offload = open_ranks(tmp_path, 1)
    index.add(EVERYWHERE)
    assert offload.has(EVERYWHERE, 0)
