"""Opens the indexes of the stores in which workers keep blocks."""

import logging

from core_proc.kv.offload import Offload
from protocol.config import EngineConfig
from protocol.core_worker import ModelFacts
from protocol.stores.index import BlockIndex
from protocol.stores.tiers import check_private, index_path, tiers

log = logging.getLogger("troika.core")


def open_stores(config: EngineConfig, facts: ModelFacts) -> Offload | None:
    """Return the stores of workers with these facts; None: they keep blocks nowhere else."""
    if not facts.kv_layout:
        return None
    indexes = []
    for tier in tiers(config):
        path = index_path(tier, facts.kv_layout)
        try:
            check_private(tier.private_directory(facts.kv_layout))
            indexes.append(BlockIndex(path))
        except (OSError, ValueError) as error:
            log.warning("KV blocks are not kept in %s: %s", tier.directory, error)
    if not indexes:
        return None
    return Offload(indexes, reads_machines=config.parallel.curve_keys is not None)
