"""A test that exceeds its timeout fails alone; one that holds the interpreter ends its process."""

import os
import subprocess
import sys

import pytest

from tests.paths import ROOT

FILE = "tests/tools/waiting_tests.py"


def run(*arguments: str) -> str:
    """Run tests of the file in one process of pytest-xdist, and return what pytest prints."""
    options = ("-p", "no:cacheprovider", "-n", "1", "-rA", "--tb=no", "--color=no", FILE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTEST_HANG_GRACE_S": "0.3"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_a_test_that_waits_fails_alone() -> None:
    """It waits in its own code, or in that of a fixture."""
    printed = run("-k", "not c_code")
    assert f"PASSED {FILE}::test_ends" in printed
    for name, kind in [("test_waits_in_python", "FAILED"), ("test_waits_in_a_fixture", "ERROR")]:
        assert f"{kind} {FILE}::{name} - Failed: Timeout" in printed, printed
    assert "node down" not in printed


@pytest.mark.slow
def test_a_test_that_holds_the_interpreter_ends_its_process_with_stacks() -> None:
    """The tests after it run in another process."""
    printed = run("-k", "c_code or ends")
    assert f"PASSED {FILE}::test_ends" in printed
    assert f"FAILED {FILE}::test_loops_in_c_code" in printed, printed
    assert "node down: Not properly terminated" in printed
    assert "in test_loops_in_c_code" in printed, "its stack is printed"
