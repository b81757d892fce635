"""Directories that stand for GGUF models: their config.json states which files are meant."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from worker_proc.errors import CheckpointError
from worker_proc.quantization.methods import GGUF
from worker_proc.quantization.scheme import CheckpointFormat, Scheme, Settings, SourceFile

_SIZES, _TIMES = "num_bytes", "mtime_ns"


def link_names(count: int) -> list[str]:
    """Return the names of the links to the files of a model, in the directory."""
    return [f"model-{number}.gguf" for number in range(1, count + 1)]


def file_states(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the settings that state which files are meant, so that a change is noticed."""
    states = [path.stat() for path in paths]
    return {
        "quant_method": GGUF,
        _SIZES: [state.st_size for state in states],
        _TIMES: [state.st_mtime_ns for state in states],
    }


def read_gguf(settings: Settings) -> CheckpointFormat:
    """Return the format, whose files must exist; their contents are checked later."""
    sizes, times = settings.get(_SIZES), settings.get(_TIMES)
    if not _are_numbers(sizes) or not _are_numbers(times) or len(sizes) != len(times):
        raise CheckpointError(
            f"{settings.directory} is not a directory that stands for GGUF files; give their path"
        )
    sources = []
    for name, size, time in zip(link_names(len(sizes)), sizes, times, strict=True):
        link = settings.directory / name
        if not os.path.isfile(link):
            target = os.readlink(link) if link.is_symlink() else link
            raise CheckpointError(f"{target} is not there; give the path of a GGUF file")
        sources.append(SourceFile(link.resolve(), size, time))
    return CheckpointFormat(GGUF, (), frozenset(), _no_scheme, sources=tuple(sources))


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(one) is int for one in value)


def check_unchanged(source: SourceFile) -> None:
    """Raise CheckpointError if a file is not the one that the directory was made for."""
    try:
        state = source.path.stat()
    except OSError as error:
        raise CheckpointError(f"{source.path}: {error.strerror or error}") from error
    if (state.st_size, state.st_mtime_ns) != (source.num_bytes, source.mtime_ns):
        raise CheckpointError(f"{source.path} has changed since the engine was started")


def _no_scheme(layer: str) -> Scheme:
    raise CheckpointError(f"{layer} is in a GGUF file, which states how it is stored")
