"""The kernels compile for a GPU, also on a machine without one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.worker.cuda.interpreter import prepare_triton

prepare_triton()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_kernels_compile_and_fit_into_shared_memory(tmp_path: Path) -> None:
    environ = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    command = [sys.executable, "-m", "tests.worker.cuda.compilation"]
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 58
