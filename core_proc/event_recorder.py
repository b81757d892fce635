"""Writes down what becomes known to the prefix cache and what is forgotten."""

from core_proc.request import Request
from protocol.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent

HASH_BYTES = 32
"""SHA-256 of the prefix: see `docs/protocol.md`."""


def group_key(block_hash: bytes, group: int) -> bytes:
    """Name a block's content: the same tokens have other KV in another group of layers."""
    return block_hash if group == 0 else block_hash + bytes([group])


class EventRecorder:
    """Events since the last `take`, and what a snapshot of the cache needs.

    Several blocks may have one content: it is stored with the first and removed with the last.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[KVEvent] = []
        self._stored: dict[bytes, BlocksStored] = {}

    def stored(self, request: Request, index: int, group: int) -> None:
        """A content is hittable that was not: that of block `index` of the request."""
        hashes, size = request.block_hashes, self._block_size
        event = BlocksStored(
            [hashes[index]],
            hashes[index - 1] if index else None,
            request.token_ids[index * size : (index + 1) * size].tolist(),
            size,
            group,
            request.cache_salt,
            request.adapter_id,
        )
        self._stored[group_key(hashes[index], group)] = event
        self._events.append(event)

    def removed(self, key: bytes) -> None:
        """No block has this content any more."""
        del self._stored[key]
        group = key[HASH_BYTES] if len(key) > HASH_BYTES else 0
        self._events.append(BlocksRemoved([key[:HASH_BYTES]], group))

    def cleared(self) -> None:
        """The cache is empty."""
        self._stored.clear()
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """Return what has happened since the last call, neighbours of one kind put together."""
        events, self._events = self._events, []
        merged: list[KVEvent] = []
        for event in events:
            joined = _join(merged[-1], event) if merged else None
            if joined is None:
                merged.append(event)
            else:
                merged[-1] = joined
        return merged

    def snapshot(self) -> list[KVEvent]:
        """Return events that tell an empty cache all that is cached now."""
        return list(self._stored.values())


_MAX_JOINED = 256
"""Hashes in one event."""


def _join(last: KVEvent, event: KVEvent) -> KVEvent | None:
    """Return both events as one, if they are neighbours of one kind."""
    if isinstance(last, BlocksRemoved) and isinstance(event, BlocksRemoved):
        if last.group != event.group or len(last.block_hashes) >= _MAX_JOINED:
            return None
        return BlocksRemoved(last.block_hashes + event.block_hashes, event.group)
    if isinstance(last, BlocksStored) and isinstance(event, BlocksStored):
        follows = event.parent_hash == last.block_hashes[-1] and event.group == last.group
        if not follows or len(last.block_hashes) >= _MAX_JOINED:
            return None
        return BlocksStored(
            last.block_hashes + event.block_hashes,
            last.parent_hash,
            last.token_ids + event.token_ids,
            event.block_size,
            event.group,
            event.cache_salt,
            event.adapter_id,
        )
    return None
