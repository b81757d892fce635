"""Identifies the contents of a checkpoint, independent of its location.

Times and paths differ between copies, so the contents of all files are hashed
(`protocol.process.model_files`).
"""

from pathlib import Path

from protocol.process.model_files import add_contents, new_digest, weight_files
from worker_proc.gguf.parts import part_paths

_SUFFIXES = frozenset({".json", ".safetensors", ".bin", ".gguf", ".pt", ".py"})


def checkpoint_identity(path: str) -> str:
    """Return the identity of a checkpoint's contents; empty: it cannot be read."""
    digest = new_digest()
    try:
        for file in _files_of(Path(path)):
            add_contents(file, digest, file.name)
    except OSError:  # loading the checkpoint reports the error
        return ""
    return digest.hexdigest()


def _files_of(checkpoint: Path) -> list[Path]:
    if not checkpoint.is_dir():
        return part_paths(checkpoint)
    found = [*checkpoint.iterdir(), *checkpoint.glob("*/*")]
    found = [file for file in found if file.suffix in _SUFFIXES]
    return sorted(file for file in {*found, *weight_files(checkpoint)} if file.is_file())
