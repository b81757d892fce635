"""The draft model's KV in stores: written and read alongside the model's, block by block.

A block has a name of its own, made of the name of the model's block and what the draft model's
bytes depend on. Nothing waits for it: drafts are never trusted, so what is missing costs time only.
"""

import hashlib
from typing import Protocol

from protocol.core_worker import StoreBlocks
from worker_proc.offload.memory import BlockMemory

_HASH_BYTES = 32


class DraftKV(Protocol):
    """Which blocks hold the draft model's KV of the tokens that the model's KV is of."""

    def holds(self, block_id: int) -> bool: ...

    def note(self, block_id: int, *, is_filled: bool) -> None: ...


class DraftBlocks:
    """The draft model's blocks as stores see them."""

    def __init__(self, memory: BlockMemory, kv: DraftKV, group: int, layout: str | None) -> None:
        """`group`: the KV group whose tables it follows; `layout` names what the bytes stand for.

        None: none of its blocks are kept. Those of a model with recurrent layers are of no use
        without its states, which are in no store.

        The memory has as many slots for readers as that of the model's blocks.
        """
        self.memory = memory
        self._kv = kv
        self._group = group
        self._layout = None if layout is None else layout.encode()

    @property
    def are_kept(self) -> bool:
        """Whether blocks are written to stores and read from them."""
        return self._layout is not None

    def name(self, key: bytes) -> bytes | None:
        """Return the name beside that of a model's block; None: of its group there are none."""
        if self._layout is None or int.from_bytes(key[_HASH_BYTES:], "little") != self._group:
            return None
        return hashlib.blake2b(key + self._layout, digest_size=_HASH_BYTES).digest()

    def beside(self, message: StoreBlocks) -> StoreBlocks:
        """Return what is to be written alongside the model's blocks: what has been computed."""
        found = [
            (block_id, name)
            for block_id, key in zip(message.block_ids, message.keys, strict=True)
            if self._kv.holds(block_id) and (name := self.name(key)) is not None
        ]
        return StoreBlocks([block_id for block_id, _ in found], [name for _, name in found])

    def note(self, block_id: int, *, is_filled: bool) -> None:
        """Note whether a block that was read for the model was read for the draft model, too."""
        self._kv.note(block_id, is_filled=is_filled)
