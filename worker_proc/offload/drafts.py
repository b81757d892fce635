"""The draft model's KV in stores, written and read together with the model's, block by block.

A block has a separate name, derived from the name of the model's block and everything that the
draft model's bytes depend on. Nothing waits for it: drafts are never trusted, so missing blocks
cost only time.
"""

import hashlib
from typing import Protocol

from protocol.core_worker import StoreBlocks
from worker_proc.offload.memory import BlockMemory

_HASH_BYTES = 32


class DraftKV(Protocol):
    """Records which blocks hold the draft model's KV for the same tokens as the model's KV."""

    def holds(self, block_id: int) -> bool: ...

    def note(self, block_id: int, *, is_filled: bool) -> None: ...


class DraftBlocks:
    """The draft model's blocks in the form that stores use."""

    def __init__(self, memory: BlockMemory, kv: DraftKV, group: int, layout: str | None) -> None:
        """`group` is the KV group whose tables it follows; `layout` names the meaning of the bytes.

        With the layout None, no blocks are kept: those of a model with recurrent layers are useless
        without its states, which are in no store.

        The memory has as many slots for readers as that of the model's blocks.
        """
        self.memory = memory
        self._kv = kv
        self._group = group
        self._layout = None if layout is None else layout.encode()

    @property
    def are_kept(self) -> bool:
        """True if blocks are written to stores and read from them."""
        return self._layout is not None

    def name(self, key: bytes) -> bytes | None:
        """Return the name of the block that accompanies a model's block; None: there is none."""
        if self._layout is None or int.from_bytes(key[_HASH_BYTES:], "little") != self._group:
            return None
        return hashlib.blake2b(key + self._layout, digest_size=_HASH_BYTES).digest()

    def beside(self, message: StoreBlocks) -> StoreBlocks:
        """Return the computed blocks that are to be written together with the model's."""
        found = [
            (block_id, name)
            for block_id, key in zip(message.block_ids, message.keys, strict=True)
            if self._kv.holds(block_id) and (name := self.name(key)) is not None
        ]
        return StoreBlocks([block_id for block_id, _ in found], [name for _, name in found])

    def note(self, block_id: int, *, is_filled: bool) -> None:
        """Record whether a block that was read for the model was also read for the draft model."""
        self._kv.note(block_id, is_filled=is_filled)
