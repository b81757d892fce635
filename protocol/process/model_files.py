"""Digests of a model's files, which are the same on every machine.

Names and sizes are the same for two trainings of one model, so contents are hashed. Small files are
hashed whole; of a large file, its beginning, which has the names and shapes of its tensors, and
pieces at equal distances. Training changes nearly all weights, and with them nearly all pieces. A
few weights that are changed by hand may go unnoticed. Hashing gigabytes would take longer than
loading them.
"""

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from protocol.model_facts import ModelFacts

NULL_MODEL = "null"
_WHOLE_BYTES = 2**20
_NUM_PIECES = 256
_PIECE_BYTES = 256
_DIGEST_BYTES = 8


class ModelFiles(NamedTuple):
    """Digests of the files that decide what a model answers; empty: unknown, or none."""

    tokenizer: str = ""
    """Digest of tokenizer.json."""
    weights: str = ""
    """Digest of the files with the weights; for the null model, its name."""

    def difference(self, facts: ModelFacts) -> str:
        """Describe how an engine's model differs; empty: no difference is known."""
        pairs = {"tokenizer": self.tokenizer, "weights": self.weights}
        found = [
            f"{name} {other} instead of {own}"
            for name, own in pairs.items()
            if own and (other := getattr(facts, name)) and other != own
        ]
        return f"model {facts.model!r} has {', '.join(found)}" if found else ""


def read_model_files(model: str) -> ModelFiles:
    """Return the digests of a model in a directory; files that cannot be read have none."""
    if model == NULL_MODEL:
        return ModelFiles(weights=NULL_MODEL)
    directory = Path(model)
    return ModelFiles(_digest([directory / "tokenizer.json"]), _digest(weight_files(directory)))


def add_contents(path: Path, digest: "hashlib.blake2b", name: str = "") -> None:
    """Hash the size and the contents of a file; raises OSError."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(0)
        digest.update(f"{name} {size} ".encode())
        digest.update(file.read(_WHOLE_BYTES))
        if size > _WHOLE_BYTES:
            for number in range(_NUM_PIECES):
                file.seek(_WHOLE_BYTES + (size - _WHOLE_BYTES) * number // _NUM_PIECES)
                digest.update(file.read(_PIECE_BYTES))


def new_digest() -> "hashlib.blake2b":
    return hashlib.blake2b(digest_size=_DIGEST_BYTES)


def _digest(files: list[Path]) -> str:
    digest = new_digest()
    try:
        for file in files:
            add_contents(file, digest)
    except OSError:
        return ""
    return digest.hexdigest() if files else ""


def weight_files(directory: Path) -> list[Path]:
    """Return the files that a worker reads: one, those of an index, or those of a GGUF model.

    Files of an index may be in subdirectories, or missing.
    """
    index = directory / "model.safetensors.index.json"
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    try:
        names = json.loads(index.read_bytes())["weight_map"].values()
        return [directory / name for name in sorted(set(names))]
    except (OSError, ValueError, TypeError, AttributeError, KeyError):
        return sorted(directory.glob("*.gguf"))
