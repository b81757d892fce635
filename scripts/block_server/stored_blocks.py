"""Reads the stores of this machine's workers, and changes nothing in them."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from protocol.config import EngineConfig
from protocol.stores.block_link import MAX_CONTENT_BYTES, PART_BYTES
from protocol.stores.index import BlockIndex
from protocol.stores.tiers import (
    Tier,
    block_path,
    blocks_directory,
    check_private,
    index_path,
    tiers,
)

_MAX_INDEXES = 64

log = logging.getLogger("troika.block_server")


class _Opened(NamedTuple):
    """An index, and which file it is: a worker may replace it by one of another size."""

    inode: int
    table: BlockIndex


class Part(NamedTuple):
    """A part of a file, and the size of the whole; no bytes of none: it is not there."""

    content: bytes
    num_bytes: int


_NOTHING = Part(b"", 0)


class StoredBlocks:
    """The blocks of all layouts and ranks, in all tiers."""

    def __init__(self, config: EngineConfig) -> None:
        self._tiers = tiers(config)
        self._opened: dict[tuple[Tier, str, int], _Opened] = {}

    def have(self, layout: str, rank: int, keys: Sequence[bytes]) -> bytes:
        """Return for each key a byte, which is 1 if the block is probably there."""
        indexes = [self._index(tier, layout, rank) for tier in self._tiers]
        known = [index for index in indexes if index is not None]
        return bytes(any(key in index for index in known) for key in keys)

    def read(self, layout: str, rank: int, key: bytes, start: int = 0) -> Part:
        """Return what the file of a block has from a byte on, at most `PART_BYTES`.

        Between two parts the file may be removed. Another tier has the same bytes under the name.
        """
        for tier in self._tiers:
            path = block_path(blocks_directory(tier, layout, rank), key)
            try:
                part = _part_of(path, start)
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("%s cannot be read: %s", path, error)
                continue
            if part.content:
                return part
        return _NOTHING

    def _index(self, tier: Tier, layout: str, rank: int) -> BlockIndex | None:
        path, name = index_path(tier, layout, rank), (tier, layout, rank)
        try:
            check_private(tier.private_directory(layout))
            inode = os.stat(path).st_ino
            opened = self._opened.get(name)
            if opened is None or opened.inode != inode:
                if len(self._opened) >= _MAX_INDEXES:
                    self._opened.clear()
                opened = self._opened[name] = _Opened(inode, BlockIndex(path))
        except (OSError, ValueError) as error:  # no worker here has this layout
            log.debug("no blocks in %s: %s", path, error)
            return None
        return opened.table


def _part_of(path: Path, start: int) -> Part:
    """Read a part of a file; nothing if it is larger than a block, or ends before the part."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(fd, "rb", buffering=0):
        num_bytes = os.fstat(fd).st_size
        if num_bytes > MAX_CONTENT_BYTES:
            return _NOTHING
        return Part(os.pread(fd, PART_BYTES, start), num_bytes)
