"""The tensors of a checkpoint as the headers of its safetensors files describe them."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from worker_proc.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000  # as in the safetensors library


class StoredTensor(NamedTuple):
    """A tensor as the header of a safetensors file describes it."""

    file: str
    dtype: str  # the format's own name, such as F32 or F8_E4M3
    shape: tuple[int, ...]


def read_headers(directory: str) -> dict[str, StoredTensor]:
    """Return the tensors of the safetensors files by their names."""
    stored: dict[str, StoredTensor] = {}
    for path in _weight_files(Path(directory)):
        stored.update(_read_header(path))
    return stored


def _weight_files(directory: Path) -> list[Path]:
    """The files that transformers reads: one, or those of an index."""
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file() or not index.is_file():
        return [path for path in [directory / "model.safetensors"] if path.is_file()]
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map does not map names to files")
    paths = [directory / file for file in sorted(set(weight_map.values()))]
    for path in paths:
        if not path.is_file():
            raise CheckpointError(f"{index} names {path.name}, which is missing")
    return paths


def _read_header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {size} bytes")
            header = json.loads(file.read(size))
            num_bytes = file.seek(0, os.SEEK_END)
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0) + 8 + size
        if num_bytes < end:
            raise ValueError(f"it has {num_bytes} bytes, and its tensors end at {end}")
        for name, entry in header.items():
            shape = tuple(int(size) for size in entry["shape"])
            yield name, StoredTensor(path.name, str(entry["dtype"]), shape)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON, or raise CheckpointError."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content
