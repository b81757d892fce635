"""Opens the stores in which a worker keeps its blocks."""

import logging
import os
from pathlib import Path

from protocol.config import EngineConfig
from protocol.stores.block_link import MAX_CONTENT_BYTES
from protocol.stores.tiers import (
    Tier,
    blocks_directory,
    engine_directory,
    make_private,
    name_engine,
    tiers,
)
from protocol.transport.curve import read_engine_keys
from worker_proc.offload.block_file import HEADER_BYTES, taken_bytes
from worker_proc.offload.block_store import BlockStore
from worker_proc.offload.drafts import DraftBlocks
from worker_proc.offload.memory import BlockMemory
from worker_proc.offload.peers import Peers
from worker_proc.offload.service import OffloadService

log = logging.getLogger("troika.worker")


def make_service(
    config: EngineConfig,
    layout: str,
    rank: int,
    memory: BlockMemory | None,
    *,
    states: BlockMemory | None = None,
    drafts: DraftBlocks | None = None,
) -> OffloadService | None:
    """Return the service that writes and reads a runner's blocks; None: nothing is kept."""
    if memory is None or not layout:
        return None
    stores = []
    num_ranks = config.parallel.num_ranks
    memories = (memory, states, drafts.memory if drafts is not None and drafts.are_kept else None)
    min_bytes = min(one.block_bytes for one in memories if one is not None)
    for tier in tiers(config):
        directory = blocks_directory(tier, layout, rank)
        try:
            make_private(tier.private_directory(layout))
            if tier.is_memory:
                name_engine(tier.directory, engine_directory(config))
            stores.append(BlockStore(directory, tier.max_bytes // num_ranks, min_bytes))
            if rank == 0:
                _check_room(tier, taken_bytes(memory.block_bytes) * num_ranks)
        except (OSError, ValueError) as error:
            log.warning("KV blocks are not kept in %s: %s", tier.directory, error)
    max_bytes = max(one.block_bytes for one in memories if one is not None)
    return OffloadService(memory, stores, states, drafts, _peers(config, layout, rank, max_bytes))


def _peers(config: EngineConfig, layout: str, rank: int, block_bytes: int) -> Peers | None:
    """Return the readers of other machines' blocks; None: there are no keys for them."""
    directory = config.parallel.curve_keys
    if directory is None:
        return None
    if HEADER_BYTES + block_bytes > MAX_CONTENT_BYTES:
        max_bytes = MAX_CONTENT_BYTES - HEADER_BYTES
        log.warning(
            "blocks of %d bytes are not read over tcp: at most %d are", block_bytes, max_bytes
        )
        return None
    try:
        return Peers(read_engine_keys(Path(directory)), layout, rank)
    except ValueError as error:
        log.warning("KV blocks of other machines are not read: %s", error)
        return None


def _check_room(tier: Tier, block_bytes: int) -> None:
    """Warn if not even one block may be kept, or if the file system has too little room."""
    if tier.max_bytes < block_bytes:
        log.warning(
            "no KV block is kept: each takes %d bytes, and at most %d may be taken in %s",
            block_bytes,
            tier.max_bytes,
            tier.directory,
        )
    free = os.statvfs(tier.directory)
    num_free = free.f_bavail * free.f_frsize
    if num_free < tier.max_bytes:
        log.warning(
            "%s has %.1f GiB left, and KV blocks may take %.1f GiB",
            tier.directory,
            num_free / 2**30,
            tier.max_bytes / 2**30,
        )
