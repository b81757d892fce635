"""The name of a checkpoint: equal for copies, and another one for other contents."""

import json
import os
import shutil
from pathlib import Path

import pytest

from worker_proc.loading.checkpoint_identity import checkpoint_identity

NUM_BYTES = 3 * 2**20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "README.md").write_text("a model")
    (directory / "model.safetensors").write_bytes(bytes(NUM_BYTES))
    return directory


def test_copy_with_other_times_and_another_path_has_the_same_name(
    checkpoint: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(checkpoint, copy)
    os.utime(copy / "model.safetensors", (1, 1))
    (copy / "README.md").write_text("the same model")
    assert checkpoint_identity(str(copy)) == checkpoint_identity(str(checkpoint)) != ""


@pytest.mark.parametrize("end", [100, 2**20, NUM_BYTES])
def test_other_contents_of_equal_size_have_another_name(checkpoint: Path, end: int) -> None:
    """Another training leaves the headers as they are."""
    before = checkpoint_identity(str(checkpoint))
    weights = bytearray(NUM_BYTES)
    first = end - 100 if end < NUM_BYTES else 2**20
    weights[first:end] = b"x" * (end - first)
    (checkpoint / "model.safetensors").write_bytes(weights)
    assert checkpoint_identity(str(checkpoint)) != before


def test_other_settings_have_another_name(checkpoint: Path) -> None:
    before = checkpoint_identity(str(checkpoint))
    (checkpoint / "config.json").write_text('{"rope_theta": 1}')
    assert checkpoint_identity(str(checkpoint)) != before


def test_single_file_has_a_name_and_a_missing_one_has_none(checkpoint: Path) -> None:
    assert checkpoint_identity(str(checkpoint / "model.safetensors")) != ""
    assert checkpoint_identity(str(checkpoint / "missing")) == ""


def test_all_parts_of_a_gguf_file_count(tmp_path: Path) -> None:
    parts = [tmp_path / f"m-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(b"a")
    before = checkpoint_identity(str(parts[0]))
    parts[1].write_bytes(b"b")
    assert checkpoint_identity(str(parts[0])) != before


def test_shards_in_subdirectories_count(checkpoint: Path) -> None:
    (checkpoint / "model.safetensors").unlink()
    shard = checkpoint / "a" / "b" / "1.safetensors"
    shard.parent.mkdir(parents=True)
    shard.write_bytes(b"a")
    index = {"weight_map": {"weight": "a/b/1.safetensors"}}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    before = checkpoint_identity(str(checkpoint))
    shard.write_bytes(b"b")
    assert checkpoint_identity(str(checkpoint)) != before
