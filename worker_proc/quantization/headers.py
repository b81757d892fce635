"""The tensors of a checkpoint as the headers of its safetensors files describe them."""

import json
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple

import msgspec

from worker_proc.errors import CheckpointError

_MAX_HEADER_BYTES = 100_000_000
"""The bound of the safetensors library."""
_ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
"""The sizes of values, by the names of types in the safetensors library."""
_Size = Annotated[int, msgspec.Meta(ge=0, le=2**62)]


class _Entry(msgspec.Struct):
    """An entry of the header of a safetensors file."""

    dtype: str
    shape: Annotated[list[_Size], msgspec.Meta(max_length=16)]
    data_offsets: tuple[_Size, _Size]


class StoredTensor(NamedTuple):
    """A tensor as the header of a safetensors file describes it."""

    file: str
    """The path within the checkpoint's directory."""
    dtype: str
    """The name of the type in the format, such as F32 or F8_E4M3."""
    shape: tuple[int, ...]


def read_headers(directory: str) -> dict[str, StoredTensor]:
    """Return the tensors of the safetensors files by their names."""
    stored: dict[str, StoredTensor] = {}
    for file in _weight_files(Path(directory)):
        stored.update(_read_header(Path(directory), file))
    return stored


def _weight_files(directory: Path) -> list[str]:
    """Return the files that transformers reads, one or those of an index, as relative paths."""
    index, single = directory / "model.safetensors.index.json", "model.safetensors"
    if (directory / single).is_file() or not index.is_file():
        return [single] if (directory / single).is_file() else []
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(f"{index}: weight_map does not map names to files")
    files = sorted(set(weight_map.values()))
    for file in files:
        if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts:
            raise CheckpointError(f"{index} names {file}, which is outside of {directory}")
        if not (directory / file).is_file():
            raise CheckpointError(f"{index} names {file}, which is missing")
    return files


def _read_header(directory: Path, file_name: str) -> Iterator[tuple[str, StoredTensor]]:
    path = directory / file_name
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > _MAX_HEADER_BYTES:
                raise ValueError(f"its header has {size} bytes")
            header = _decode(file.read(size))
            num_bytes = file.seek(0, os.SEEK_END)
        header.pop("__metadata__", None)
        entries = {name: _read_entry(name, entry) for name, entry in header.items()}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error
    end = max((entry.data_offsets[1] for entry in entries.values()), default=0) + 8 + size
    if num_bytes < end:
        raise CheckpointError(
            f"{path} is not a safetensors file: it has {num_bytes} bytes, and its tensors end at"
            f" {end}"
        )
    for name, entry in entries.items():
        yield name, StoredTensor(file_name, entry.dtype, tuple(entry.shape))


def _decode(content: bytes) -> dict[str, msgspec.Raw]:
    """Return the entries of a header, which are not decoded yet; raises ValueError."""
    try:
        return msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its header cannot be read: {error}") from error


def _read_entry(name: str, content: msgspec.Raw) -> _Entry:
    """Return the entry of a tensor whose bytes are those of its shape; raises ValueError."""
    try:
        entry = msgspec.json.decode(content, type=_Entry)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the entry of {name} cannot be read: {error}") from error
    bits = _ITEM_BITS.get(entry.dtype)
    if bits is None:
        raise ValueError(f"{name} is stored as {entry.dtype[:40]}, which is not known")
    if math.prod(max(size, 1) for size in entry.shape) > 2**60:
        raise ValueError(f"{name} has sizes that are too large: {entry.shape}")
    begin, end = entry.data_offsets
    num_bytes, rest = divmod(math.prod(entry.shape) * bits, 8)
    if rest or end - begin != num_bytes:
        raise ValueError(
            f"{name} has {end - begin} bytes, and its shape {entry.shape} in {entry.dtype} takes"
            f" {num_bytes}"
        )
    return entry


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON, or raise CheckpointError."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{path} cannot be read as JSON: it is nested too deeply") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} does not hold a JSON object")
    return content
