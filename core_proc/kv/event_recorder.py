"""Records the contents that enter the prefix cache and those that leave it."""

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from core_proc.request import Request
from protocol.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent

HASH_BYTES = 32
"""SHA-256 of the prefix: see `docs/protocol.md`."""


def group_key(block_hash: bytes, group: int) -> bytes:
    """Return the key of a block's content; the same tokens have other KV in each KV group."""
    return block_hash if group == 0 else block_hash + bytes([group])


class _Content(NamedTuple):
    """The content of a block. Kept small, since there may be one for every block of the pool."""

    block_hash: bytes
    parent_hash: bytes | None
    token_ids: "array[int]"
    group: int
    cache_salt: str
    adapter_id: int


_MAX_UNTAKEN = 100_000
"""Maximum number of records since the last `take`, or twice the stored contents if that is more."""

_Record = _Content | BlocksRemoved | AllBlocksCleared


class EventRecorder:
    """Events since the last `take`, and the contents for a snapshot.

    Several blocks may have the same content: it is stored with the first, and removed with the
    last.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._records: list[_Record] = []
        self._stored: dict[bytes, _Content] = {}

    def stored(self, request: Request, index: int, group: int) -> None:
        """Record that block `index` of the request is cached, the first with its content."""
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
        """Record that no block has this content any more."""
        del self._stored[key]
        group = key[HASH_BYTES] if len(key) > HASH_BYTES else 0
        self._note(BlocksRemoved([key[:HASH_BYTES]], group))

    def _note(self, record: _Record) -> None:
        self._records.append(record)
        if len(self._records) > max(_MAX_UNTAKEN, 2 * len(self._stored)):
            # `take` has not been called for long: starting over is shorter.
            self._records = [AllBlocksCleared(), *self._stored.values()]

    def cleared(self) -> None:
        self._stored.clear()
        self._records.append(AllBlocksCleared())

    def take(self) -> list[KVEvent]:
        """Return the events since the last call; adjacent events of one kind are merged."""
        records, self._records = self._records, []
        return list(self._merged(records))

    def snapshot(self) -> Iterator[KVEvent]:
        """Yield events that bring an empty cache to its state at the time of the call."""
        return self._merged(list(self._stored.values()))

    def _merged(self, records: Iterable[_Record]) -> Iterator[KVEvent]:
        """Merge events of one kind; events of different groups may change their order."""
        latest: dict[int, BlocksStored | BlocksRemoved] = {}
        for item in records:
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
"""Maximum number of hashes in one event."""


def _join(last: BlocksStored | BlocksRemoved, event: BlocksStored | BlocksRemoved) -> bool:
    """Merge an event with the last one of its group if it continues it; return whether it does."""
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
