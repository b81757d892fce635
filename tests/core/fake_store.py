"""A store of KV blocks for scheduler tests, which keeps what the fake worker has in them."""

from protocol.core_worker import LoadBlocks, StoreBlocks
from tests.core.fake_states import OF_DRAFTS
from tests.core.fake_worker import FakeWorker


class FakeStore:
    """It outlives workers, and may lose any block."""

    def __init__(self) -> None:
        self.index: set[bytes] = set()
        self._blocks: dict[bytes, list[tuple[int, int] | None]] = {}
        self._states: dict[bytes, int] = {}

    def write(self, worker: FakeWorker, message: StoreBlocks) -> None:
        for block_id, key in zip(message.block_ids, message.keys, strict=True):
            self._blocks[key] = worker.content(block_id)
            self.index.add(key)
        for block_id, key in zip(message.state_block_ids, message.state_keys, strict=True):
            assert worker.states is not None
            self._states[key] = worker.states.content(block_id)
            self.index.add(key)

    def read_state(
        self, worker: FakeWorker, message: LoadBlocks, other: "FakeStore | None" = None
    ) -> bool:
        """Fill the state block; returns whether there is one to fill, and its state is there.

        `other`: as in `read`.
        """
        if not message.state_key:
            return False
        assert worker.states is not None
        content = self._states.get(message.state_key)
        if content is None and message.source and other is not None:
            content = other._states.get(message.state_key)
        if content is None:
            self.index.discard(message.state_key)
            worker.states.fill(message.state_block_id, OF_DRAFTS)
            return False
        worker.states.fill(message.state_block_id, content)
        return True

    def read(
        self, worker: FakeWorker, message: LoadBlocks, most: int, other: "FakeStore | None" = None
    ) -> int:
        """Fill at most `most` leading blocks, and spoil the next one; returns their number.

        `other`: that of another machine, which is read where the message names one.
        """
        reaches = self._blocks
        if message.source and other is not None:
            reaches = {**other._blocks, **self._blocks}
        pairs = list(zip(message.block_ids, message.keys, strict=True))
        assert len({block_id for block_id, _ in pairs}) == len(pairs)
        for number, (block_id, key) in enumerate(pairs):
            content = reaches.get(key)
            if content is None or number == most:
                self.index.discard(key)
                worker.spoil(block_id)
                return number
            worker.fill(block_id, content)
        return len(pairs)
