"""A store of KV blocks for scheduler tests, which keeps what the fake worker has in them."""

from protocol.core_worker import LoadBlocks, StoreBlocks
from tests.core.fake_worker import FakeWorker


class FakeStore:
    """It outlives workers, and may lose any block."""

    def __init__(self) -> None:
        self.index: set[bytes] = set()
        self._blocks: dict[bytes, list[tuple[int, int] | None]] = {}

    def write(self, worker: FakeWorker, message: StoreBlocks) -> None:
        for block_id, key in zip(message.block_ids, message.keys, strict=True):
            self._blocks[key] = worker.content(block_id)
            self.index.add(key)

    def read(self, worker: FakeWorker, message: LoadBlocks, most: int) -> int:
        """Fill at most `most` leading blocks, and spoil the next one; returns their number."""
        pairs = list(zip(message.block_ids, message.keys, strict=True))
        assert len({block_id for block_id, _ in pairs}) == len(pairs)
        for number, (block_id, key) in enumerate(pairs):
            content = self._blocks.get(key)
            if content is None or number == most:
                self.index.discard(key)
                worker.spoil(block_id)
                return number
            worker.fill(block_id, content)
        return len(pairs)
