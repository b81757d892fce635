"""Tensors lie in huge pages, one behind the other, and their memory is free again."""

import gc
import mmap
import struct
from pathlib import Path

import pytest
import torch

from worker_proc.native import huge_pages
from worker_proc.native.huge_pages import CHUNK_BYTES, copy_of, empty
from worker_proc.native.kernels import load_library
from worker_proc.native.packed_weights import Format


@pytest.fixture(autouse=True)
def _chunks_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_chunks", [])


def test_weights_in_one_mapping_keep_their_values() -> None:
    sizes = [1, 7, 128, 100_003, 0, CHUNK_BYTES // 3, CHUNK_BYTES // 2, 12]
    weights = [empty(size, torch.uint8) for size in sizes]
    for number, weight in enumerate(weights):
        weight.fill_(number)
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        assert len(weight) == size
        assert bool((weight == number).all())


def test_other_types_and_shapes_are_copied() -> None:
    values = torch.arange(60, dtype=torch.int32).view(3, 4, 5).permute(2, 0, 1)
    assert torch.equal(copy_of(values), values.reshape(-1))


def test_what_is_deleted_at_the_end_is_used_again() -> None:
    first = empty(1000, torch.uint8)
    place = empty(1000, torch.uint8).data_ptr()
    second, third = empty(1000, torch.uint8), empty(1000, torch.uint8)
    assert second.data_ptr() == place
    del second  # another one is behind it
    assert empty(1000, torch.uint8).data_ptr() > third.data_ptr()
    del third
    assert empty(1000, torch.uint8).data_ptr() == place
    assert first.data_ptr() < place


@pytest.mark.parametrize("num_bytes", [CHUNK_BYTES // 2 + 1, 2 * CHUNK_BYTES])
def test_a_mapping_ends_with_the_last_weight_in_it(num_bytes: int) -> None:
    weight = empty(num_bytes, torch.uint8)
    start = weight.data_ptr()
    part = weight[1000:1010]
    other = empty(CHUNK_BYTES, torch.uint8)  # in another mapping
    del weight
    gc.collect()
    assert _flags_at(start)
    part.fill_(1)
    del part
    gc.collect()
    assert not _flags_at(start)
    assert _flags_at(other.data_ptr())


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="no huge pages")
def test_huge_pages_are_asked_for() -> None:
    assert "hg" in _flags_at(empty(10, torch.float32).data_ptr())
    assert "hg" in _flags_at(empty(CHUNK_BYTES, torch.float32).data_ptr())


def test_a_format_that_a_weight_does_not_fit_leaves_no_memory() -> None:
    """Exponents of these values differ too much for compact weights."""
    library = load_library()
    if library is None:
        pytest.skip("no compiled kernels")
    weight = torch.logspace(-30, 30, 64 * 64).view(64, 64).bfloat16()
    found = library.packer.pack(weight, None, Format.COMPACT)
    assert found.format is Format.UNITS
    assert empty(1, torch.uint8).data_ptr() - found.panels.data_ptr() <= found.panels.nbytes + 128


def test_memory_of_deleted_weights_returns_to_the_system() -> None:
    kept, deleted = empty(1000, torch.uint8), empty(32 << 20, torch.uint8)
    kept.fill_(1)
    deleted.fill_(1)
    place = deleted.data_ptr()
    assert _resident_bytes(place, 32 << 20) >= 32 << 20
    del deleted
    assert _resident_bytes(place, 32 << 20) <= 4 << 20
    assert bool((kept == 1).all())


def _flags_at(address: int) -> list[str]:
    """Return the flags of the mapping at an address; none: there is none."""
    return _mapping_at(address).get("VmFlags", [])


def _resident_bytes(start: int, num_bytes: int) -> int:
    """Return the memory that the pages of a range take; the system merges mappings side by side."""
    first, end = start // mmap.PAGESIZE, -(-(start + num_bytes) // mmap.PAGESIZE)
    with open("/proc/self/pagemap", "rb") as pages:
        pages.seek(first * 8)
        entries = struct.unpack(f"{end - first}Q", pages.read((end - first) * 8))
    return sum(entry >> 63 for entry in entries) * mmap.PAGESIZE


def _mapping_at(address: int) -> dict[str, list[str]]:
    """Return what the system reports about the mapping at an address."""
    found: dict[str, list[str]] = {}
    is_there = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if name.endswith(":"):
            if is_there:
                found[name[:-1]] = values
        else:
            first, end = (int(part, 16) for part in name.split("-"))
            is_there = first <= address < end
    return found
