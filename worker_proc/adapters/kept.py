"""The adapters that a worker has in memory, by their ids."""

from collections.abc import Callable
from typing import Generic, TypeVar

from protocol.adapters import Adapter

T = TypeVar("T")


class KeptAdapters(Generic[T]):
    """At most `num_kept` adapters. `read` makes one of its files, alongside the steps."""

    def __init__(self, read: Callable[[Adapter], T], num_kept: int) -> None:
        """`read` is called in another thread; it raises AdapterError for an adapter in error."""
        self.read = read
        self.num_kept = num_kept
        self._kept: dict[int, T] = {}
        self._digests: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, adapter_id: object) -> bool:
        return adapter_id in self._kept

    def __getitem__(self, adapter_id: int) -> T:
        return self._kept[adapter_id]

    def holds(self, adapter: Adapter) -> bool:
        """Return whether an adapter is there, and not another one with the same id."""
        found = self._digests.get(adapter.adapter_id) == adapter.digest
        return found and adapter.adapter_id in self._kept

    def put(self, adapter: Adapter, loaded: T) -> None:
        self._kept[adapter.adapter_id] = loaded
        self._digests[adapter.adapter_id] = adapter.digest

    def drop(self, adapter_id: int) -> None:
        """Drop an adapter, if it is there."""
        self._kept.pop(adapter_id, None)
        self._digests.pop(adapter_id, None)

    def drop_all_but(self, claimed: set[int]) -> None:
        """Drop one adapter after the other, until there is room, but for some."""
        for adapter_id in [one for one in self._kept if one not in claimed]:
            if len(self._kept) < self.num_kept:
                break
            self.drop(adapter_id)
