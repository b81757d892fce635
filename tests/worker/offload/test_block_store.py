"""A store of blocks: what is read is what was written under that name, or nothing."""

import errno
import fcntl
import hashlib
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from worker_proc.offload.block_file import taken_bytes
from worker_proc.offload.block_store import BlockStore

BLOCK_BYTES = 4096
FILE_BYTES = taken_bytes(BLOCK_BYTES)


def key(number: int) -> bytes:
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def block(number: int) -> list[memoryview]:
    """Return a block in several parts."""
    data = memoryview(hashlib.shake_128(bytes([number])).digest(BLOCK_BYTES))
    return [data[:1000], data[1000:1001], data[1001:]]


def empty() -> list[memoryview]:
    data = memoryview(bytearray(BLOCK_BYTES))
    return [data[:2000], data[2000:]]


def make(path: Path, max_blocks: int = 100) -> BlockStore:
    return BlockStore(path, max_blocks * FILE_BYTES, BLOCK_BYTES)


def read(store: BlockStore, number: int) -> bytes | None:
    parts = empty()
    return b"".join(parts) if store.read(key(number), parts) else None


def content(number: int) -> bytes:
    return b"".join(block(number))


def file_of(path: Path, number: int) -> Path:
    name = key(number).hex()
    return path / name[:2] / name


def test_another_process_reads_what_was_written(tmp_path: Path) -> None:
    one, other = make(tmp_path), make(tmp_path)
    assert read(one, 1) is None
    assert one.write(key(1), block(1))
    assert key(1) in other.index
    assert read(other, 1) == content(1)
    assert one.write(key(1), block(1))  # again: it is there
    (tmp_path / "index").unlink()
    assert read(make(tmp_path), 1) == content(1)
    assert key(1) in make(tmp_path).index  # it was entered anew


def test_stores_that_are_opened_together_share_one_index(tmp_path: Path) -> None:
    """Otherwise none finds what the other has written, and each counts its own bytes only."""
    for number in range(30):
        start = threading.Barrier(4)
        stores: list[BlockStore] = []

        def open_store(
            start: threading.Barrier = start, path: Path = tmp_path / str(number)
        ) -> None:
            start.wait()
            stores.append(make(path))  # noqa: B023

        threads = [threading.Thread(target=open_store) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stores[0].write(key(1), block(1))
        assert all(key(1) in store.index for store in stores)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def flip_header(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[5] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, FILE_BYTES // 2)


def empty_file(path: Path) -> None:
    os.truncate(path, 0)


def lengthen(path: Path) -> None:
    """Append a byte, and name the new length in the header."""
    data = bytearray(path.read_bytes()) + b"x"
    data[8:16] = (BLOCK_BYTES + 1).to_bytes(8, "little")
    path.write_bytes(data)


def replace(path: Path) -> None:
    """Put the intact file of another block there."""
    shutil.copyfile(file_of(path.parents[1], 2), path)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("harm", [flip, flip_header, cut, empty_file, lengthen, replace, remove])
def test_a_damaged_block_is_not_read_and_can_be_written_again(
    harm: Callable[[Path], None], tmp_path: Path
) -> None:
    store = make(tmp_path)
    store.write(key(1), block(1))
    store.write(key(2), block(2))
    harm(file_of(tmp_path, 1))
    assert read(store, 1) is None
    assert key(1) not in store.index
    assert not file_of(tmp_path, 1).exists()
    assert read(store, 2) == content(2)
    assert store.write(key(1), block(1))
    assert read(store, 1) == content(1)


def test_the_least_recently_used_blocks_leave_a_full_store(tmp_path: Path) -> None:
    store = make(tmp_path, max_blocks=10)
    for number in range(10):
        store.write(key(number), block(number))
        os.utime(file_of(tmp_path, number), ns=(number, number))
    assert read(store, 0) == content(0)
    store.write(key(10), block(10))
    left = [number for number in range(11) if key(number) in store.index]
    assert left == [0, 3, 4, 5, 6, 7, 8, 9, 10]
    assert all(file_of(tmp_path, number).exists() == (number in left) for number in range(11))
    assert store.index.num_bytes == 9 * FILE_BYTES


@pytest.mark.parametrize("block_bytes", [0, 100, 4096, 10_000])
def test_a_store_takes_no_more_than_its_bytes(block_bytes: int, tmp_path: Path) -> None:
    """Files take whole pages, also those of blocks without content."""
    max_bytes = 2**19
    store = BlockStore(tmp_path, max_bytes, block_bytes)
    parts = [memoryview(bytes(block_bytes))]
    for number in range(400):
        assert store.write(key(number), parts)
    files = [path for path in tmp_path.glob("??/*") if path.is_file()]
    assert sum(path.stat().st_blocks * 512 for path in files) <= max_bytes
    num_kept = max_bytes // taken_bytes(block_bytes)
    assert len(files) >= 0.8 * min(num_kept, 400)
    assert all(key(number) in store.index for number in range(399, 399 - num_kept // 2, -1))


def test_threads_of_one_process_exclude_each_other(tmp_path: Path) -> None:
    """The lock of the file is the process's, so that it does not."""
    store = make(tmp_path)

    def write() -> bool:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(store.write, key(1), block(1), waits=False).result(10)

    with store._locked(1) as has_lock:
        assert has_lock
        assert not write()
    assert write()


def test_a_block_larger_than_the_store_is_left_out(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, BLOCK_BYTES, BLOCK_BYTES)
    assert not store.write(key(1), block(1))
    assert read(store, 1) is None


def test_files_of_dead_writers_are_removed(tmp_path: Path) -> None:
    store = make(tmp_path, max_blocks=3)
    store.write(key(1), block(1))
    old, new = (file_of(tmp_path, 1).with_name(f"new-{name}") for name in ("old", "fresh"))
    old.write_bytes(bytes(10))
    new.write_bytes(bytes(10))
    os.utime(old, (0, 0))
    for number in range(2, 6):
        store.write(key(number), block(number))
    assert not old.exists()
    assert new.exists()


def test_a_full_file_system_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int, parts: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = make(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", fail)
        with pytest.raises(OSError, match="No space"):
            store.write(key(1), block(1))
    assert key(1) not in store.index
    assert not any(path.is_file() for path in (tmp_path / key(1).hex()[:2]).iterdir())
    assert store.write(key(1), block(1))


def test_a_write_that_ends_early_is_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = os.writev
    monkeypatch.setattr(os, "writev", lambda fd, parts: whole(fd, [parts[0], parts[1][:300]]))
    store = make(tmp_path)
    store.write(key(1), block(1))
    assert read(store, 1) == content(1)


def test_a_store_whose_lock_is_held_by_another_process_is_not_waited_for(tmp_path: Path) -> None:
    store = make(tmp_path)
    with (tmp_path / "lock").open() as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not store.write(key(1), block(1))
    assert store.write(key(1), block(1))
