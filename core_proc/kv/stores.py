"""Opens the indexes of the stores in which workers keep blocks."""

import logging
from collections.abc import Sequence

from core_proc.kv.offload import Index, Offload
from protocol.config import EngineConfig, ParallelConfig
from protocol.model_facts import STAGE_SEPARATOR, ModelFacts
from protocol.process.machines import blocks_address
from protocol.stores.index import BlockIndex
from protocol.stores.tiers import check_private, index_path, tiers

log = logging.getLogger("troika.core")


def open_stores(config: EngineConfig, facts: ModelFacts) -> Offload | None:
    """Return the stores of workers with these facts; None: they keep no blocks outside the pool."""
    if not facts.kv_layout:
        return None
    indexes = []
    layouts = _layouts_of_ranks(facts.kv_layout, config.parallel)
    for tier in tiers(config):
        try:
            for layout in set(layouts):
                check_private(tier.private_directory(layout))
            parts = [
                BlockIndex(index_path(tier, layout, rank)) for rank, layout in enumerate(layouts)
            ]
            indexes.append(parts[0] if len(parts) == 1 else RankIndexes(parts))
        except (OSError, ValueError) as error:
            log.warning("KV blocks are not kept in %s: %s", tier.directory, error)
    if not indexes:
        return None
    return Offload(
        indexes,
        reads_machines=config.parallel.curve_keys is not None,
        server_here=blocks_address(config),
    )


def _layouts_of_ranks(kv_layout: str, parallel: ParallelConfig) -> list[str]:
    """Return the layout of each rank, which is that of its stage if stages differ."""
    layouts = kv_layout.split(STAGE_SEPARATOR)
    per_layout = parallel.num_ranks // len(layouts)
    return [layout for layout in layouts for _ in range(per_layout)]


class RankIndexes:
    """The probable contents of one store over all ranks: a block is useful if every rank has it.

    Block sizes differ if stages have different layers, so that a full store of one rank has lost
    blocks that another one still has.
    """

    def __init__(self, ranks: Sequence[Index]) -> None:
        self._ranks = ranks

    def __contains__(self, key: bytes, /) -> bool:
        return all(key in index for index in self._ranks)

    def discard(self, key: bytes, /) -> None:
        for index in self._ranks:
            index.discard(key)

    def clear(self) -> None:
        for index in self._ranks:
            index.clear()
