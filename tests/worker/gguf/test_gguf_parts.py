"""Models in several GGUF files: all parts are one model, and each must be the one it is taken for.

The `gguf` package writes the parts, as llama.cpp's tools do.
"""

import shutil
import struct
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file
from transformers import LlamaConfig

from protocol.config import ConfigError, ModelConfig
from scripts.gguf.directory import make_directory
from scripts.supervisor.model_names import resolve
from tests.worker.gguf.gguf_files import WIDE, write_gguf
from worker_proc.errors import CheckpointError
from worker_proc.gguf.files import GgufFiles
from worker_proc.gguf.model_header import read_header
from worker_proc.gguf.parts import MAX_PARTS, part_name, part_paths
from worker_proc.loading.inspection import inspect_config
from worker_proc.quantization.gguf import check_unchanged

CONFIG = LlamaConfig(**WIDE | {"num_hidden_layers": 1})
NUM_TENSORS = 12
PER_PART = 5


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The first of four parts, and a plain checkpoint."""
    directory = tmp_path_factory.mktemp("parts")
    return write_gguf(directory, CONFIG, Type.Q8_0, tensors_per_part=PER_PART)


@pytest.fixture
def first(written: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The first of four parts that a test may change."""
    monkeypatch.setattr("scripts.gguf.cache.cache_directory", lambda: tmp_path / "cache")
    for path in part_paths(written[0]):
        shutil.copy(path, tmp_path)
    return tmp_path / written[0].name


def test_the_tensors_of_all_parts_are_those_of_the_model(
    first: Path, written: tuple[Path, Path]
) -> None:
    """Each part may be reached by a link, as in the hub's cache."""
    header = read_header(*part_paths(first))
    assert len(header.files) == 4
    assert [len(file.tensors) for file in header.files] == [0, PER_PART, PER_PART, 2]
    assert len(header.tensors) == NUM_TENSORS
    for number, path in enumerate(part_paths(first)):
        path.rename(blob := first.with_name(f"blob{number}"))
        path.symlink_to(blob)
    directory = make_directory(first)
    assert directory.name == "tiny"
    format = inspect_config(str(directory), "auto", torch.device("cpu")).format
    assert format is not None
    files = GgufFiles(format.sources)
    found = {key: one.read().dequantize(torch.float32) for key, one in files.weights.items()}
    found |= {key: part[...].float() for key, part in files.plain_slices().items()}
    expected = load_file(written[1] / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(values, expected[key]) for key, values in found.items())

    blob.write_bytes(blob.read_bytes() + b"more")
    with pytest.raises(CheckpointError, match=r"blob3 has changed since the engine was started"):
        check_unchanged(format.sources[3])
    assert make_directory(first) != directory


def test_a_part_that_is_missing_is_named(first: Path) -> None:
    third = part_paths(first)[2]
    third.unlink()
    with pytest.raises(CheckpointError) as caught:
        make_directory(first)
    assert str(caught.value) == f"{first}: part 3 of 4 is missing: {third.name}"


def test_parts_in_another_order_are_refused(first: Path) -> None:
    _, second, third, _ = part_paths(first)
    content = second.read_bytes()
    shutil.copy(third, second)
    third.write_bytes(content)
    with pytest.raises(CheckpointError, match=rf"{second}: .* part 2 of 4, and split.no is 2"):
        make_directory(first)


def test_a_part_of_another_model_is_refused(first: Path, tmp_path: Path) -> None:
    """The number of parts or of tensors shows it, or a tensor that another part has."""
    paths = part_paths(first)
    contents = [path.read_bytes() for path in paths]

    def refusal(part: int, content: bytes) -> str:
        paths[part].write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            make_directory(first)
        paths[part].write_bytes(contents[part])
        return str(caught.value)

    number = b"split.no" + struct.pack("<IH", 2, 3)
    assert number in contents[3]
    again = contents[2].replace(b"split.no" + struct.pack("<IH", 2, 2), number)
    assert "two of the model's tensors have the same name" in refusal(3, again)
    count = b"split.count" + struct.pack("<IH", 2, 4)
    more = contents[1].replace(count, count[:-2] + struct.pack("<H", 5))
    assert "split.no is 1, split.count 5" in refusal(1, more)
    total = b"split.tensors.count" + struct.pack("<Ii", 5, NUM_TENSORS)
    fewer = contents[0].replace(total, total[:-4] + struct.pack("<i", NUM_TENSORS - 1))
    assert f"is {NUM_TENSORS - 1}, and the 4 parts have {NUM_TENSORS} tensors" in refusal(0, fewer)


def test_parts_are_found_by_their_names_only(first: Path, tmp_path: Path) -> None:
    path = tmp_path / "renamed.gguf"
    shutil.copy(part_paths(first)[1], path)
    with pytest.raises(CheckpointError, match=r"no general.architecture"):
        make_directory(path)
    shutil.copy(first, path)
    with pytest.raises(CheckpointError, match=r"one of 4 parts of a model, which are found by"):
        make_directory(path)


def test_the_path_of_the_first_part_loads_the_model(first: Path) -> None:
    assert resolve(ModelConfig(model=str(first))).served_model_name == ("tiny",)
    second = part_paths(first)[1]
    with pytest.raises(ConfigError) as caught:
        resolve(ModelConfig(model=str(second)))
    assert str(caught.value) == f"model {second} is part 2 of 4; give the first one, {first.name}"
    with pytest.raises(ConfigError, match=r"has no config.json; give one of its GGUF files"):
        resolve(ModelConfig(model=str(first.parent)))


@pytest.mark.parametrize(
    ("name", "count", "number", "model"),
    [
        ("a-00002-of-00003.gguf", 3, 2, "a"),
        ("a-00001-of-00001.gguf", 1, 1, "a"),
        ("a-00000-of-00003.gguf", 1, 1, "a-00000-of-00003"),
        ("a-00004-of-00003.gguf", 1, 1, "a-00004-of-00003"),
        (f"a-00001-of-{MAX_PARTS + 1:05}.gguf", 1, 1, f"a-00001-of-{MAX_PARTS + 1:05}"),
        ("a-1-of-3.gguf", 1, 1, "a-1-of-3"),
        ("a.gguf", 1, 1, "a"),
    ],
)
def test_the_name_of_one_part_gives_those_of_all(
    name: str, count: int, number: int, model: str
) -> None:
    part = part_name(name)
    assert (len(part.names), part.number, part.model) == (count, number, model)
    assert part.names[number - 1] == name
