"""transformers' list of its models and their names, in a form that can be kept.

transformers reads all of its files for it. The list is the same as long as no file was added,
removed or replaced.
"""

import importlib.metadata
import os
from pathlib import Path
from typing import Any

import msgspec


class Folder(msgspec.Struct, array_like=True):
    """A folder: its own modules, and the folders in it."""

    modules: list[tuple[list[str], dict[str, list[str]]]]
    """Libraries that are needed, and the names of each module that needs them."""
    folders: dict[str, "Folder"]

    def structure(self) -> dict[Any, Any]:
        """Return the list as transformers makes it."""
        found: dict[Any, Any] = {
            frozenset(needed): {module: set(names) for module, names in modules.items()}
            for needed, modules in self.modules
        }
        return found | {name: folder.structure() for name, folder in self.folders.items()}

    @classmethod
    def of(cls, structure: dict[Any, Any]) -> "Folder | None":
        """Return the list in this form; None: it holds something else."""
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
    """Return what changes when files of transformers are added, removed or replaced."""
    with os.scandir(folder) as entries:
        folders = [entry.path for entry in entries if entry.is_dir()]
    times = sorted(f"{path} {os.stat(path).st_mtime_ns}" for path in (str(folder), *folders))
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:  # a folder in sys.path
        version = ""
    return "\n".join([version, *times]).encode()
