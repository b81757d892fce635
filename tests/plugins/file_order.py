"""Orders test files so that several processes use the processors evenly.

Tests of the whole system wait for processes most of the time, and those of workers compute.
"""

from itertools import chain
from pathlib import Path

import pytest

from tests.paths import ROOT

LONGEST = [
    *("remote_blocks", "offload", "lora", "resumption"),
    *("hangs", "recurrent", "chaos", "stages"),
    *("parity", "divided_states", "resume", "hub_start"),
    *("simulation", "scale", "soak", "boundaries"),
]
"""Files that come first, so that no process is left with a long one at the end."""
_TESTS = ROOT / "tests"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mix the files of tests that wait with those of tests that compute."""
    by_file: dict[Path, list[pytest.Item]] = {}
    for item in items:
        by_file.setdefault(item.path, []).append(item)
    items[:] = chain.from_iterable(by_file[path] for path in _mixed(list(by_file)))


def _mixed(files: list[Path]) -> list[Path]:
    longest = [f"test_{name}.py" for name in LONGEST]
    groups: dict[str, list[Path]] = {}
    for path in sorted(files, key=lambda path: path.name not in longest):
        name = path.relative_to(_TESTS).parts[0]
        groups.setdefault(name if name in ("system", "worker") else "", []).append(path)
    places = {
        path: place / len(group) for group in groups.values() for place, path in enumerate(group)
    }
    return sorted(files, key=places.__getitem__)
