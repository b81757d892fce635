"""Stores transformers' list of its models and their names.

transformers reads all of its files to create the list. The list stays the same as long as no file
is added, removed or replaced.
"""

import importlib.metadata
import os
from pathlib import Path
from typing import Any

import msgspec


class Folder(msgspec.Struct, array_like=True):
    """A folder, with its own modules and subfolders."""

    modules: list[tuple[list[str], dict[str, list[str]]]]
    """Required libraries, with the names defined by each module that needs them."""
    folders: dict[str, "Folder"]

    def structure(self) -> dict[Any, Any]:
        """Return the list in transformers' form."""
        found: dict[Any, Any] = {
            frozenset(needed): {module: set(names) for module, names in modules.items()}
            for needed, modules in self.modules
        }
        return found | {name: folder.structure() for name, folder in self.folders.items()}

    @classmethod
    def of(cls, structure: dict[Any, Any]) -> "Folder | None":
        """Convert the list from transformers' form; None: it has unexpected content."""
        folder = cls([], {})
        for key, value in structure.items():
            if not isinstance(value, dict):
                return None
            if isinstance(key, frozenset):
                modules = {module: sorted(names) for module, names in value.items()}
                folder.modules.append((sorted(key), modules))
            elif (inner := cls.of(value)) is not None:
                folder.folders[key] = inner
        return folder if folder.structure() == structure else None


def fingerprint(folder: Path) -> bytes:
    """Return bytes that change when files of transformers are added, removed or replaced."""
    with os.scandir(folder) as entries:
        folders = [entry.path for entry in entries if entry.is_dir()]
    times = sorted(f"{path} {os.stat(path).st_mtime_ns}" for path in (str(folder), *folders))
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:  # transformers is a folder in sys.path
        version = ""
    return "\n".join([version, *times]).encode()
