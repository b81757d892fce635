"""A scheduler with a store of blocks."""

from core_proc.kv.offload import Offload
from protocol.core_worker import BlocksLoaded, LoadBlocks, StoreBlocks
from tests.core.fake_store import FakeStore
from tests.core.harness import Harness

BLOCK = 16
PROMPT = [1000 + i for i in range(6 * BLOCK + 3)]
"""Six full blocks."""


class Bench(Harness):
    """A scheduler with a store, which a worker fills and reads."""

    def __init__(self, store: FakeStore | None = None, **config: object):
        self.store = store or FakeStore()
        self.offload = Offload([self.store.index])
        super().__init__(caching=True, offload=self.offload, **config)  # type: ignore[arg-type]
        self.loads: list[LoadBlocks] = []
        self.num_stored = 0

    def transfer(self) -> None:
        """Let the worker write what is to be stored, and take the loads."""
        for message in self.scheduler.take_transfers():
            if isinstance(message, StoreBlocks):
                self.num_stored += len(message.keys)
                self.store.write(self.worker, message)
            else:
                self.loads.append(message)

    def answer(self, most: int = 1000, *, has_state: bool = True) -> None:
        load = self.loads.pop(0)
        has_state = has_state and self.store.read_state(self.worker, load)
        num_blocks = self.store.read(self.worker, load, most)
        answer = BlocksLoaded(load.req_id, num_blocks, 1000, has_state)
        self.scheduler.blocks_loaded(answer)


def filled_store() -> FakeStore:
    """Return a store with the blocks of PROMPT."""
    bench = Bench()
    bench.add("a", PROMPT, 2)
    bench.step()
    bench.transfer()
    assert bench.num_stored == 6
    return bench.store


def check_that_a_load_waits_for_the_end_of_another(bench: Bench, prompt: list[int]) -> None:
    """The bench has room for one request; `prompt` is stored."""
    bench.add("running", 20, 5)
    bench.step()
    bench.add("a", prompt, 2)
    bench.step()
    bench.transfer()
    assert bench.loads == []
    while "running" not in bench.finished:
        bench.step()
    bench.step()
    bench.transfer()
    bench.answer()
    bench.run()
    assert set(bench.finished) == {"running", "a"}
