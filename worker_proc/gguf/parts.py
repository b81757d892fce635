"""The files of one model: a large model is published in parts, as `llama-gguf-split` names them.

NAME-00001-of-00003.gguf is the first of three.
"""

import re
from pathlib import Path
from typing import NamedTuple

MAX_PARTS = 1024
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)


class PartName(NamedTuple):
    """The model and the part that the name of a file stands for."""

    names: tuple[str, ...]
    """The names of all files of the model, in order."""
    number: int
    """The number of this file, from 1 on."""
    model: str
    """The name of the model."""


def part_name(name: str) -> PartName:
    """Parse the name of a file; most models have one file."""
    found = _PART.fullmatch(name)
    if found is not None:
        model, number, count, end = found[1], int(found[2]), int(found[3]), found[4]
        if 1 <= number <= count <= MAX_PARTS:
            names = (f"{model}-{one:05}-of-{count:05}{end}" for one in range(1, count + 1))
            return PartName(tuple(names), number, model)
    stem = Path(name).stem
    return PartName((name,), 1, stem if stem.strip(".") else name)  # not "." nor ".."


def part_paths(path: Path) -> list[Path]:
    """Return the files of the model that has a file, in order."""
    return [path.with_name(name) for name in part_name(path.name).names]
