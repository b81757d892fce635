"""Pages of weight files that were read are let go of, and none that was written to."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from protocol.config.settings import configure
from tests.tools.checkpoint_formats import resident
from tests.worker.checkpoints import SHAPE, build_checkpoint
from worker_proc.loading.mapped_pages import release_mapped_pages
from worker_proc.startup.prepare import prepare_model

NUM_VALUES = 8 << 20
NUM_BYTES = NUM_VALUES * 4


def map_weights(path: Path) -> torch.Tensor:
    """Write a file of weights, map it and read all of it."""
    weights = torch.arange(NUM_VALUES, dtype=torch.float32)
    save_file({"weight": weights}, path)
    offset = path.stat().st_size - NUM_BYTES
    storage = torch.UntypedStorage.from_file(str(path), False, offset + NUM_BYTES)
    values = torch.tensor([], dtype=torch.float32).set_(storage, offset // 4, (NUM_VALUES,))
    assert torch.equal(values, weights)
    return values


@pytest.mark.parametrize("name", ["model.safetensors", "a/b/1.safetensors"])
def test_pages_that_were_read_are_let_go_of(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    index = {"weight_map": {"weight": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    values = map_weights(tmp_path / name)
    before = resident("RssFile")
    release_mapped_pages(str(tmp_path))
    assert before - resident("RssFile") > 0.9 * NUM_BYTES / 10**6
    assert torch.equal(values, torch.arange(NUM_VALUES, dtype=torch.float32))


def test_values_that_were_written_stay(tmp_path: Path) -> None:
    values = map_weights(tmp_path / "model.safetensors")
    values[NUM_VALUES // 2] = -1.0
    release_mapped_pages(str(tmp_path))
    assert values[NUM_VALUES // 2] == -1.0
    assert values[0] == 0.0
    assert values[-1] == NUM_VALUES - 1


def test_files_need_not_be_mapped(tmp_path: Path) -> None:
    release_mapped_pages(str(tmp_path))
    release_mapped_pages(str(tmp_path / "missing"))


def resident_kilobytes(path: Path) -> int:
    """Return how much of a file is in the memory of this process."""
    total, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.partition(" ")[0]:
            is_file = line.endswith(str(path))
        elif is_file and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total


def test_a_model_that_is_loaded_keeps_only_the_pages_that_it_reads(tmp_path: Path) -> None:
    config = LlamaConfig(**SHAPE | {"vocab_size": 1 << 16})
    build_checkpoint(tmp_path, config, torch.bfloat16)
    path = tmp_path / "model.safetensors"
    prepared = prepare_model(configure(model=str(tmp_path), device="cpu"), lambda *_: None)
    assert resident_kilobytes(path) < path.stat().st_size / 1024 / 8
    table = load_file(path)["model.embed_tokens.weight"]
    embedding = prepared.loaded.model.get_input_embeddings()
    assert torch.equal(embedding(torch.arange(1 << 16)).float(), table.bfloat16().float())
