"""Kernels for other processors than this one."""

import shutil

import pytest

from worker_proc.native.build import build
from worker_proc.native.kernels import NativeLibrary


@pytest.fixture(scope="module")
def without_tiles(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    """The kernels of a processor without AMX; a copy, since each file is loaded once."""
    copied = tmp_path_factory.mktemp("native") / "copy.so"
    shutil.copy(build(), copied)
    return NativeLibrary(copied, uses_tiles=False, uses_floats=False)
