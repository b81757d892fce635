"""The headers of all files of a model: keys, and a table of all tensors."""

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.gguf.further_types import further_block, why_not_dequantized
from worker_proc.gguf.header import FileHeader, TensorEntry, check_place, read_file_header
from worker_proc.gguf.types import READ, TensorType

_NUMBER, _COUNT, _NUM_TENSORS = "split.no", "split.count", "split.tensors.count"


class Header(NamedTuple):
    """The header of a model, whose keys are those of its first file."""

    files: tuple[FileHeader, ...]
    tensors: dict[str, TensorEntry]
    """The tensors of all files, by name."""

    @property
    def path(self) -> Path:
        """The first file, by which errors name the model."""
        return self.files[0].path

    @property
    def metadata(self) -> dict[str, Any]:
        """Values by their keys."""
        return self.files[0].metadata

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def check_types(self) -> None:
        """Raise UnsupportedModel for a type that is not read, CheckpointError for a wrong place."""
        places = []
        for entry in self.tensors.values():
            path = self.files[entry.file].path
            if entry.type in READ:
                block = TensorType(entry.type).block
            elif reason := why_not_dequantized(entry.type):
                raise UnsupportedModel(f"{path}: {entry.name[:100]} {reason}")
            else:
                block = further_block(entry.type)
            end = check_place(path, self.files[entry.file].file_bytes, entry, block)
            places.append((entry.file, entry.offset, end, entry.name))
        for (file, _, end, first), (other, start, _, second) in pairwise(sorted(places)):
            if file == other and start < end:
                raise CheckpointError(
                    f"{self.files[file].path}: {second[:100]} begins at byte {start}, before"
                    f" {first[:100]} ends at byte {end}"
                )


def read_header(*paths: Path) -> Header:
    """Read the headers of a model's files; raises CheckpointError with what is wrong with them."""
    return join([_read_file(path, number, paths) for number, path in enumerate(paths, start=1)])


def join(files: Sequence[FileHeader]) -> Header:
    """Return the header of a model from those of its files, which must be all, in their order."""
    first = files[0]
    if not isinstance(first.metadata.get("general.architecture"), str):
        raise CheckpointError(f"{first.path}: it has no general.architecture")
    for number, file in enumerate(files):
        _check_part(file, number, len(files))
    tensors: dict[str, TensorEntry] = {}
    for number, file in enumerate(files):
        for entry in file.tensors:
            if entry.name in tensors:
                whose = "its tensors" if len(files) == 1 else "the model's tensors"
                raise CheckpointError(
                    f"{file.path}: two of {whose} have the same name, {entry.name[:100]}"
                )
            tensors[entry.name] = entry._replace(file=number)
    expected = first.metadata.get(_NUM_TENSORS, len(tensors))
    if len(files) > 1 and expected != len(tensors):
        raise CheckpointError(
            f"{first.path}: {_NUM_TENSORS} is {expected!r:.100}, and the {len(files)} parts have"
            f" {len(tensors)} tensors"
        )
    return Header(tuple(files), tensors)


def _check_part(file: FileHeader, number: int, count: int) -> None:
    """Raise CheckpointError unless a file is the part of a model that its name states."""
    stated = file.metadata.get(_COUNT, 0)
    if count == 1 and stated not in (0, 1):
        raise CheckpointError(
            f"{file.path}: it is one of {stated!r:.100} parts of a model, which are found by names"
            " that end with their numbers, such as -00001-of-00002.gguf"
        )
    found = (file.metadata.get(_NUMBER), stated)
    if count > 1 and found != (number, count):
        raise CheckpointError(
            f"{file.path}: by its name it is part {number + 1} of {count}, and {_NUMBER} is"
            f" {found[0]!r:.100}, {_COUNT} {stated!r:.100}"
        )


def _read_file(path: Path, number: int, paths: Sequence[Path]) -> FileHeader:
    try:
        with path.open("rb") as file:
            return read_file_header(path, os.fstat(file.fileno()).st_size, file.read)
    except FileNotFoundError as error:
        if number == 1:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        raise CheckpointError(
            f"{paths[0]}: part {number} of {len(paths)} is missing: {path.name}"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror or error}") from error
