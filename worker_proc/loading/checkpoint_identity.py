"""Identifies the contents of a checkpoint, independent of its location.

Times and paths differ between copies, while names and sizes are the same for two trainings of one
model, so contents are hashed. Small files are hashed whole; of a large file, its beginning, which
has the names and shapes of its tensors, and pieces at equal distances. Training changes nearly all
weights, and with them nearly all pieces. A few weights that are changed by hand may go unnoticed.
Hashing gigabytes would take longer than loading them.
"""

import hashlib
from pathlib import Path

from worker_proc.gguf.parts import part_paths

_SUFFIXES = frozenset({".json", ".safetensors", ".bin", ".gguf", ".pt", ".py"})
_WHOLE_BYTES = 2**20
_NUM_PIECES = 256
_PIECE_BYTES = 256
_DIGEST_BYTES = 8


def checkpoint_identity(path: str) -> str:
    """Return the identity of a checkpoint's contents; empty: it cannot be read."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    try:
        for file in _files_of(Path(path)):
            _add(file, digest)
    except OSError:  # loading the checkpoint reports the error
        return ""
    return digest.hexdigest()


def _files_of(checkpoint: Path) -> list[Path]:
    if not checkpoint.is_dir():
        return part_paths(checkpoint)
    found = [*checkpoint.iterdir(), *checkpoint.glob("*/*")]
    return sorted(file for file in found if file.suffix in _SUFFIXES and file.is_file())


def _add(path: Path, digest: "hashlib.blake2b") -> None:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        digest.update(f"{path.name} {size} ".encode())
        digest.update(file.read(_WHOLE_BYTES))
        if size > _WHOLE_BYTES:
            for number in range(_NUM_PIECES):
                file.seek(_WHOLE_BYTES + (size - _WHOLE_BYTES) * number // _NUM_PIECES)
                digest.update(file.read(_PIECE_BYTES))
