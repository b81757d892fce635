"""Stores of another machine behind a block server, and a worker that reads them."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from protocol.config.settings import configure
from protocol.core_worker import BlocksFound, BlocksLoaded, FindBlocks, LoadBlocks
from protocol.stores.tiers import blocks_directory, tiers
from protocol.transport.curve import ClientKeys, read_engine_keys
from scripts.block_server.server import BlockServer
from tests.worker.offload.bench import Bench, key
from worker_proc.offload.block_reader import BlockReader
from worker_proc.offload.block_store import BlockStore
from worker_proc.offload.peers import Peers
from worker_proc.offload.service import OffloadService

LAYOUT = "0123456789abcdef"


class Machine:
    """Stores and a block server, in a thread."""

    def __init__(self, path: Path, keys: Path, port: int = 0) -> None:
        with socket.create_server(("127.0.0.1", port)) as free:
            self.port = free.getsockname()[1]
        self.config = configure(
            model="null",
            kv_offload_dir=str(path / "kv"),
            kv_listen=f"127.0.0.1:{self.port}",
            curve_keys=str(keys),
            run_dir=str(path),
        )
        self.directory = blocks_directory(tiers(self.config)[0], LAYOUT, 0)
        self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._server = BlockServer(self.config, str(path), time.monotonic)
        self.is_silent = False
        self.delay_s = 0.0
        self._ends = False
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._ends:
            self._server.sockets[1].poll(5)
            if not self.is_silent:
                self._server.turn()
                time.sleep(self.delay_s)

    def store(self, bench: Bench, *block_ids: int) -> None:
        """Write blocks of a worker's pool, each under the key of its number."""
        store = BlockStore(self.directory, 2**20, bench.memory.block_bytes)
        for block_id in block_ids:
            bench.memory.copy_out([block_id], [0])()
            assert store.write(key(block_id), bench.memory.parts(0))

    def file(self, number: int) -> Path:
        name = key(number).hex()
        return self.directory / name[:2] / name

    def close(self) -> None:
        if not self._ends:
            self._ends = True
            self._thread.join()
            self._server.close()


class ClosedPeers(Peers):
    """Peers whose connections can be ended: those of a worker last as long as its process."""

    def __init__(self, keys: ClientKeys, layout: str, rank: int) -> None:
        super().__init__(keys, layout, rank)
        self._returned = threading.Condition()
        self._num_lent = 0

    @contextlib.contextmanager
    def reader(self, address: str) -> Iterator[BlockReader]:
        with self._returned:
            self._num_lent += 1
        try:
            with super().reader(address) as reader:
                yield reader
        finally:
            with self._returned:
                self._num_lent -= 1
                self._returned.notify_all()

    def close(self) -> None:
        """Disconnect, once no thread has a connection."""
        with self._returned:
            assert self._returned.wait_for(lambda: self._num_lent == 0, 10)
        if self._context is not None:
            self._context.destroy(linger=0)


class Reader:
    """A worker of this machine, with a store of its own."""

    def __init__(self, path: Path, keys: Path, layout: str = LAYOUT) -> None:
        self.bench = Bench([path / "here"])
        self.peers = ClosedPeers(read_engine_keys(keys), layout, 0)
        bench = self.bench
        self.service = bench.service = OffloadService(
            bench.memory, bench.stores, bench.state_memory, bench.drafts, self.peers
        )

    def load(
        self, address: str, numbers: list[int], block_ids: list[int], limit_ms: int = 0
    ) -> BlocksLoaded:
        names = [key(number) for number in numbers]
        message = LoadBlocks(5, block_ids, names, source=address, limit_ms=limit_ms)
        return self.service.load(message) or self.bench.answer()

    def find(self, address: str, *numbers: int) -> bytes:
        names = [key(number) for number in numbers]
        assert self.service.find(FindBlocks(7, address, names)) is None
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if answers := self.service.take_results():
                (answer,) = answers
                assert isinstance(answer, BlocksFound)
                return answer.are_there
            time.sleep(0.002)
        raise AssertionError("no answer")
