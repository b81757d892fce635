"""What config.json of a directory that stands for a GGUF file states of the file."""

import os
from pathlib import Path
from typing import Any

from worker_proc.errors import CheckpointError
from worker_proc.quantization.scheme import CheckpointFormat, Scheme, Settings, SourceFile

METHOD = "gguf"
"""`quant_method`."""
LINK = "model.gguf"
"""The link to the file, in the directory."""
_SIZE, _TIME = "num_bytes", "mtime_ns"


def file_state(path: Path) -> dict[str, Any]:
    """Return the settings that state which file is meant, so that a change is noticed."""
    state = path.stat()
    return {"quant_method": METHOD, _SIZE: state.st_size, _TIME: state.st_mtime_ns}


def read_gguf(settings: Settings) -> CheckpointFormat:
    """Return the format, whose file must be there; what is in it is checked later."""
    link = settings.directory / LINK
    numbers = [settings.get(key) for key in (_SIZE, _TIME)]
    if not os.path.isfile(link) or not all(isinstance(number, int) for number in numbers):
        target = os.readlink(link) if link.is_symlink() else link
        raise CheckpointError(f"{target} is not there; give the path of a GGUF file")
    source = SourceFile(link.resolve(), *numbers)
    return CheckpointFormat(METHOD, "", frozenset(), _no_scheme, source=source)


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
