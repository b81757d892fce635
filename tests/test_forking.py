"""The processes of the default suite are forked."""

import os
from pathlib import Path

import pytest

from tests.plugins.forking import BOOTSTRAP, HAS_GPU

WORKER = "PYTEST_XDIST_WORKER"


def test_a_process_of_several_is_forked() -> None:
    """A test module that starts a thread when it is imported prevents that, and costs seconds."""
    if WORKER not in os.environ or HAS_GPU:
        pytest.skip("the tests run in one process, or on a machine whose processes are not forked")
    is_started = BOOTSTRAP.encode() in Path("/proc/self/cmdline").read_bytes().split(b"\0")
    assert not is_started, "importing the tests starts a thread, or this process replaces another"
