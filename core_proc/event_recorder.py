"""Writes down what becomes known to the prefix cache and what is forgotten."""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from core_proc.request import Request
from protocol.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent

HASH_BYTES = 32
"""SHA-256 of the prefix: see `docs/protocol.md`."""


def group_key(block_hash: bytes, group: int) -> bytes:
    """Name a block's content: the same tokens have other KV in another group of layers."""
    return block_hash if group == 0 else block_hash + bytes([group])


class _Content(NamedTuple):
    """What one block holds, kept small: there may be one for every block of the pool."""

    block_hash: bytes
    parent_hash: bytes | None
    token_ids: "array[int]"
    group: int
    cache_salt: str
    adapter_id: int


_MAX_UNTAKEN = 100_000
"""Of what has happened since the last `take`, unless more is stored."""

_Happening = _Content | BlocksRemoved | AllBlocksCleared


class EventRecorder:
    """Events since the last `take`, and what a snapshot of the cache needs.

    Several blocks may have one content: it is stored with the first and removed with the last.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._happened: list[_Happening] = []
        self._stored: dict[bytes, _Content] = {}

    def stored(self, request: Request, index: int, group: int) -> None:
        """A content is hittable that was not: that of block `index` of the request."""
        hashes, size = request.block_hashes, self._block_size
        content = _Content(
            hashes[index],
            hashes[index - 1] if index else None,
            request.token_ids[index * size : (index + 1) * size],
            group,
            request.cache_salt,
            request.adapter_id,
        )
        self._stored[group_key(hashes[index], group)] = content
        self._note(content)

    def removed(self, key: bytes) -> None:
        """No block has this content any more."""
        del self._stored[key]
        group = key[HASH_BYTES] if len(key) > HASH_BYTES else 0
        self._note(BlocksRemoved([key[:HASH_BYTES]], group))

    def _note(self, happening: _Happening) -> None:
        self._happened.append(happening)
        if len(self._happened) > max(_MAX_UNTAKEN, 2 * len(self._stored)):
            # Nobody has asked for long: a new beginning is shorter than all of it.
            self._happened = [AllBlocksCleared(), *self._stored.values()]

    def cleared(self) -> None:
        """The cache is empty."""
        self._stored.clear()
        self._happened.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """Return what has happened since the last call, neighbours of one kind put together."""
        happened, self._happened = self._happened, []
        return list(self._merged(happened))

    def snapshot(self) -> Iterator[KVEvent]:
        """Return events that tell an empty cache all that is cached at the time of the call.

        They are made as they are asked for: all of a large cache at once would take long.
        """
        return self._merged(list(self._stored.values()))

    def _merged(self, happened: Iterable[_Happening]) -> Iterator[KVEvent]:
        """Put events together; those of different groups may change places."""
        latest: dict[int, BlocksStored | BlocksRemoved] = {}
        for item in happened:
            if isinstance(item, AllBlocksCleared):
                yield from latest.values()
                latest.clear()
                yield item
                continue
            event = self._event(item) if isinstance(item, _Content) else item
            before = latest.get(event.group)
            if before is None or not _join(before, event):
                if before is not None:
                    yield before
                latest[event.group] = event
        yield from latest.values()

    def _event(self, content: _Content) -> BlocksStored:
        block_hash, parent_hash, token_ids, group, cache_salt, adapter_id = content
        return BlocksStored(
            [block_hash],
            parent_hash,
            token_ids.tolist(),
            self._block_size,
            group,
            cache_salt,
            adapter_id,
        )


_MAX_JOINED = 256
"""Hashes in one event."""


def _join(last: BlocksStored | BlocksRemoved, event: BlocksStored | BlocksRemoved) -> bool:
    """Add an event to the last one of its group, if they are of one kind and go on."""
    if len(last.block_hashes) >= _MAX_JOINED:
        return False
    if isinstance(last, BlocksStored) and isinstance(event, BlocksStored):
        if event.parent_hash != last.block_hashes[-1]:
            return False
        last.token_ids.extend(event.token_ids)
    elif type(last) is not type(event):
        return False
    last.block_hashes.extend(event.block_hashes)
    return True
