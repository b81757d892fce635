"""Blocks of another machine: what comes is what was written there, or the load ends in time."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from protocol.config.settings import configure
from protocol.core_worker import BlocksFound, BlocksLoaded, FindBlocks, LoadBlocks
from protocol.transport.curve import make_keys, read_client_keys, read_engine_keys
from scripts.block_server import server as server_module
from scripts.block_server.server import BlockServer
from tests.worker.offload.bench import Bench, key
from tests.worker.offload.machines import LAYOUT, ClosedPeers, Machine, Reader
from worker_proc.offload import block_reader, finder


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["api"])
    return tmp_path / "keys"


@pytest.fixture
def there(tmp_path: Path, keys: Path) -> Iterator[Machine]:
    (tmp_path / "there").mkdir()
    machine = Machine(tmp_path / "there", keys)
    yield machine
    machine.close()


@pytest.fixture
def reader(tmp_path: Path, keys: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path, keys)
    yield reader
    reader.peers.close()


def emptied(bench: Bench) -> None:
    for tensor in bench.tensors:
        tensor.zero_()


def test_blocks_come_as_they_were_written_there(there: Machine, reader: Reader) -> None:
    bench = reader.bench
    before = {number: bench.content(number) for number in range(1, 7)}
    there.store(bench, *before)
    emptied(bench)
    assert reader.find(there.address, 3, 9, 1) == b"\1\0\1"
    answer = reader.load(there.address, [3, 1, 2, 6, 5, 4], [1, 2, 3, 4, 5, 6])
    assert (answer.num_blocks, answer.num_remote_blocks) == (6, 6)
    assert 0 < answer.remote_ns <= answer.load_ns
    found = [bench.content(block_id) for block_id in range(1, 7)]
    assert found == [before[number] for number in (3, 1, 2, 6, 5, 4)]
    assert not any(any(bench.content(block_id)) for block_id in (0, 7, 8, 9))


def test_what_a_store_here_has_is_read_here(there: Machine, reader: Reader) -> None:
    bench = reader.bench
    before = {number: bench.content(number) for number in (1, 2, 3)}
    there.store(bench, 2, 3)
    bench.store(1, 3)
    bench.wait_for(1, 3)
    emptied(bench)
    answer = reader.load(there.address, [1, 2, 3], [4, 5, 6])
    assert (answer.num_blocks, answer.num_remote_blocks) == (3, 1)
    assert [bench.content(block_id) for block_id in (4, 5, 6)] == list(before.values())


def damage(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)


def swap_names(file: Path) -> None:
    """Another block, intact, under this name."""
    other = next(path for path in file.parent.parent.rglob("??" + "?" * 62) if path != file)
    file.write_bytes(other.read_bytes())


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def lengthen(file: Path) -> None:
    file.write_bytes(file.read_bytes() + b"\0")


def remove(file: Path) -> None:
    file.unlink()


def replace_by_directory(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.parametrize("spoil", [damage, swap_names, cut, lengthen, remove, replace_by_directory])
def test_a_block_that_is_not_right_ends_the_load(
    spoil: Callable[[Path], None], there: Machine, reader: Reader
) -> None:
    bench = reader.bench
    before = bench.content(1)
    there.store(bench, 1, 2, 3)
    emptied(bench)
    spoil(there.file(2))
    answer = reader.load(there.address, [1, 2, 3], [4, 5, 6])
    assert (answer.num_blocks, answer.num_remote_blocks) == (1, 1)
    assert bench.content(4) == before
    assert not any(any(bench.content(block_id)) for block_id in (5, 6))
    assert reader.load(there.address, [1], [7]).num_blocks == 1  # the machine is used further


def test_another_layout_or_rank_has_other_blocks(
    there: Machine, tmp_path: Path, keys: Path, reader: Reader
) -> None:
    there.store(reader.bench, 1)
    other = Reader(tmp_path / "other", keys, "fedcba9876543210")
    assert other.find(there.address, 1) == b"\0"
    assert other.load(there.address, [1], [4]).num_blocks == 0
    other.peers.close()


def test_a_reader_with_an_unknown_key_gets_nothing(
    there: Machine, tmp_path: Path, keys: Path
) -> None:
    make_keys(tmp_path / "foreign", ["foreign"])
    (tmp_path / "foreign" / "server.key").write_bytes((keys / "server.key").read_bytes())
    (tmp_path / "foreign" / "server.secret").unlink()
    reader = Reader(tmp_path, tmp_path / "foreign")
    there.store(reader.bench, 1)
    assert reader.find(there.address, 1) == b""
    assert reader.load(there.address, [1], [4]).num_blocks == 0
    reader.peers.close()


def test_a_client_on_the_list_may_read(there: Machine, tmp_path: Path, keys: Path) -> None:
    reader = Reader(tmp_path, keys)
    reader.peers._keys = read_client_keys(keys)
    there.store(reader.bench, 1)
    assert reader.find(there.address, 1) == b"\1"
    reader.peers.close()


def test_a_machine_that_does_not_answer_is_waited_for_once(
    there: Machine, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_reader, "ANSWER_TIMEOUT_S", 0.3)
    there.store(reader.bench, 1)
    there.is_silent = True
    assert reader.find(there.address, 1) == b""
    began = time.monotonic()
    assert reader.load(there.address, [1], [4]).num_blocks == 0
    assert reader.find(there.address, 1) == b""
    assert time.monotonic() - began < 0.25
    there.is_silent = False
    monkeypatch.setattr(reader.peers, "_paused_until", {})
    assert reader.load(there.address, [1], [4]).num_blocks == 1


def test_leading_blocks_that_are_here_are_read_although_the_other_machine_is_gone(
    there: Machine, reader: Reader
) -> None:
    bench = reader.bench
    before = [bench.content(number) for number in (1, 2)]
    bench.store(1, 2)
    bench.wait_for(1, 2)
    there.close()
    answer = reader.load(there.address, [1, 2, 3], [4, 5, 6])
    assert (answer.num_blocks, answer.num_remote_blocks) == (2, 0)
    assert [bench.content(block_id) for block_id in (4, 5)] == before


def test_every_question_is_answered_in_time(
    there: Machine, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finder, "_TIMEOUT_S", 0.4)
    there.is_silent = True
    began = time.monotonic()
    for number in range(20):
        reader.service.find(FindBlocks(number, there.address, [key(1)]))
    answers: list[BlocksFound | BlocksLoaded] = []
    while len(answers) < 20:
        assert reader.service.deadline is not None
        assert time.monotonic() - began < 1.0
        answers += reader.service.take_results()
        time.sleep(0.002)
    assert {answer.req_id for answer in answers} == set(range(20))
    assert reader.service.deadline is None


def test_where_nothing_listens_nothing_is_waited_for(reader: Reader) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    began = time.monotonic()
    assert reader.find(address, 1) == b""
    assert time.monotonic() - began < 0.5


def test_a_slow_machine_is_read_for_as_long_as_computing_takes(
    there: Machine, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_DRAIN_LIMIT", 1)
    numbers = list(range(1, 11))
    there.store(reader.bench, *numbers)
    assert reader.find(there.address, 1) == b"\1"
    there.delay_s = 0.15
    began = time.monotonic()
    answer = reader.load(there.address, numbers, numbers, limit_ms=400)
    assert 0.35 < time.monotonic() - began < 1.0
    assert 0 < answer.num_blocks < 5
    there.delay_s = 0.0
    assert reader.load(there.address, numbers, numbers).num_blocks == 10, "it is not left alone"


def test_a_server_that_ends_amid_a_load_ends_it(
    there: Machine, reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "_DRAIN_LIMIT", 1)
    there.store(reader.bench, 1, 2, 3)
    assert reader.find(there.address, 1) == b"\1"  # it is connected
    there.is_silent = True
    message = LoadBlocks(5, [4, 5], [key(1), key(2)], source=there.address)
    assert reader.service.load(message) is None
    there.close()
    began = time.monotonic()
    assert reader.bench.answer().num_blocks == 0
    assert time.monotonic() - began < block_reader.ANSWER_TIMEOUT_S + 0.5


def test_a_server_that_comes_back_is_read_again(
    there: Machine, tmp_path: Path, keys: Path, reader: Reader
) -> None:
    there.store(reader.bench, 1)
    assert reader.find(there.address, 1) == b"\1"
    there.close()
    again = Machine(tmp_path / "there", keys, there.port)
    # The first question may be lost with the kept connection.
    assert (reader.find(again.address, 1) or reader.find(again.address, 1)) == b"\1"
    assert reader.load(again.address, [1], [4]).num_blocks == 1
    again.close()


def test_an_adoption_forgets_questions(there: Machine, reader: Reader) -> None:
    there.store(reader.bench, 1)
    assert reader.service.find(FindBlocks(7, there.address, [key(1)])) is None
    reader.service.begin_adoption()
    assert reader.find(there.address, 1, 2) == b"\1\0"  # only this answer comes


def test_a_server_stays_for_readers_after_a_drain(tmp_path: Path, keys: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = configure(
        model="null",
        kv_offload_dir=str(tmp_path / "kv"),
        kv_listen=f"127.0.0.1:{port}",
        curve_keys=str(keys),
    )
    now = 100.0
    server = BlockServer(config, str(tmp_path), lambda: now)
    peers = ClosedPeers(read_engine_keys(keys), LAYOUT, 0)
    assert not server.is_drained
    server.drain()
    now += 2.5
    assert not server.is_drained
    answers: list[bytes] = []

    def ask() -> None:
        with peers.reader(f"tcp://127.0.0.1:{port}") as reader:
            answers.append(reader.find([key(1)]))

    asking = threading.Thread(target=ask)
    asking.start()
    while not answers and asking.is_alive():
        server.turn()
    asking.join()
    assert answers == [b"\0"]
    now += 1.9
    server.drain()  # it is repeated
    assert not server.is_drained
    now += 0.2
    assert server.is_drained
    peers.close()
    server.close()


def test_an_index_that_is_replaced_is_opened_again(there: Machine, reader: Reader) -> None:
    there.store(reader.bench, 1)
    assert reader.find(there.address, 1, 2) == b"\1\0"
    (there.directory / "index").unlink()
    there.store(reader.bench, 2)
    assert reader.find(there.address, 1, 2) == b"\1\1"
