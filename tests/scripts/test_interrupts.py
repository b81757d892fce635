"""Ctrl-C while a command imports its modules."""

import signal
import subprocess
import sys

import pytest

from tests.paths import ROOT

PROGRAM = """
import os, runpy, signal, sys

program, imported, *sys.argv[1:] = sys.argv[1:]

class Interrupt:
    def find_spec(name, path=None, target=None):
        if name == imported:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner may ignore it
sys.meta_path.insert(0, Interrupt)
runpy.run_module(program, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    ("program", "imported", "arguments"),
    [
        ("scripts.supervisor", "scripts.supervisor.command", ["null"]),
        ("scripts.cli", "scripts.supervisor.command", ["serve", "null"]),
        ("scripts.cli", "scripts.status", ["status"]),
    ],
)
def test_an_import_is_ended_without_a_traceback(
    program: str, imported: str, arguments: list[str]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, program, imported, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
