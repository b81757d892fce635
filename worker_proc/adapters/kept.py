"""The adapters that a worker has in memory, by id."""

from collections.abc import Callable
from typing import Generic, TypeVar

from protocol.adapters import Adapter

T = TypeVar("T")


class KeptAdapters(Generic[T]):
    """Holds at most `num_kept` adapters, which `read` loads from files alongside the steps."""

    def __init__(self, read: Callable[[Adapter], T], num_kept: int) -> None:
        """`read` is called in another thread; it raises AdapterError for an invalid adapter."""
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
        """Return whether this adapter is loaded, and not another one with the same id."""
        return self._digests.get(adapter.adapter_id) == adapter.digest

    def put(self, adapter: Adapter, loaded: T) -> None:
        """Add an adapter, or replace another one with the same id."""
        self._kept[adapter.adapter_id] = loaded
        self._digests[adapter.adapter_id] = adapter.digest

    def drop(self, adapter_id: int) -> None:
        """Drop an adapter, if it is loaded."""
        self._kept.pop(adapter_id, None)
        self._digests.pop(adapter_id, None)

    def drop_all_but(self, claimed: set[int]) -> None:
        """Drop adapters that are not in `claimed` until there is room for another one."""
        for adapter_id in [one for one in self._kept if one not in claimed]:
            if len(self._kept) < self.num_kept:
                break
            self.drop(adapter_id)
