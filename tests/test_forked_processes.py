"""The plugin that runs tests in forked processes: a death fails one test, and none is lost."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MANY = """
import os, signal
import pytest

@pytest.fixture(scope="session", autouse=True)
def log():
    path = f"{{os.environ['LOG']}}/{number}-{{os.getpid()}}"
    open(path, "w").close()
    yield
    os.rename(path, path + "-closed")

def test_passes(tmp_path):
    print("unseen")

@pytest.mark.parametrize("n", range(3))
def test_fails(n):
    print("printed by", n)
    assert n != 1, "one"

@pytest.mark.skip
def test_skipped():
    pass

def test_dies():
    if {number} == 1:
        os.kill(os.getpid(), signal.SIGKILL)

def test_goes_on():
    if {number} == 2:
        os._exit(3)
"""


def run_tests(tmp_path: Path, *options: str) -> str:
    """Run three files of tests, and return what pytest prints."""
    (tmp_path / "log").mkdir()
    for number in range(3):
        (tmp_path / f"test_{number}.py").write_text(MANY.format(number=number))
    command = [
        "-m",
        "pytest",
        "-p",
        "tests.forked_processes",
        "-p",
        "no:cacheprovider",
        "-q",
        "-rA",
    ]
    return subprocess.run(
        [sys.executable, *command, "--basetemp", str(tmp_path / "base"), *options, "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "LOG": str(tmp_path / "log")},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    ).stdout


def test_each_test_has_one_result_and_a_process_that_dies_fails_its_test(tmp_path: Path) -> None:
    output = run_tests(tmp_path, "--processes", "2")
    assert "5 failed, 13 passed, 3 skipped" in output
    for number in range(3):
        assert f"FAILED test_{number}.py::test_fails[1]" in output
    assert "FAILED test_1.py::test_dies - the process ended: signal 9" in output
    assert "FAILED test_2.py::test_goes_on - the process ended: exit status 3" in output
    assert output.count("printed by 1") >= 3
    logs = [path.name.split("-") for path in (tmp_path / "log").iterdir()]
    # Another process takes the place of a dead one if there are tests left.
    assert 2 <= len({log[1] for log in logs}) <= 4
    assert len({log[1] for log in logs if "closed" not in log}) == 2, "others close fixtures"


def test_the_session_stops_where_it_is_asked_to(tmp_path: Path) -> None:
    output = run_tests(tmp_path, "--processes", "3", "-x")
    assert re.search(r"stopping after \d failures", output)  # others may fail meanwhile
