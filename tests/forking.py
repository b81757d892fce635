"""Forks the processes of pytest-xdist from one that has imported what the tests import.

Imports take most of the time before the first test. Only the first process spends it.
"""

import contextlib
import gc
import importlib
import os
import signal
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import pytest

ROOT = Path(__file__).resolve().parent.parent


class _Forked:
    """The first process's end of the pipes to a forked one, which reads a program and runs it."""

    def __init__(self, others: Iterable["_Forked"]) -> None:
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            for other in others:  # else it would keep their pipes open
                other.to_child.close()
                other.from_child.close()
            os.close(ours_out)
            os.close(ours_in)
            _run(theirs_in, theirs_out)
        os.close(theirs_in)
        os.close(theirs_out)
        self.to_child, self.from_child = os.fdopen(ours_out, "wb"), os.fdopen(ours_in, "rb")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    def wait(self) -> int | None:
        with contextlib.suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return None


def _run(source: int, target: int) -> NoReturn:
    """Do what `python -c` does in a process that execnet starts."""
    try:
        os.dup2(source, 0)
        os.dup2(target, 1)
        os.close(source)
        os.close(target)
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        exec(eval(sys.stdin.readline()), {})
    finally:
        os._exit(0)


def _import_tests(arguments: Iterable[str]) -> None:
    """Import the test modules below some paths; those with errors are left to the collection."""
    for argument in arguments:
        path = Path(argument.split("::")[0]).resolve()
        files = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        for file in files:
            if not file.is_relative_to(ROOT):
                continue
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            with (
                contextlib.suppress(Exception, pytest.skip.Exception),
                warnings.catch_warnings(action="error"),
            ):
                importlib.import_module(name)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Import the tests, fork, and let execnet use the forked processes instead of starting any."""
    from execnet import gateway_io

    if not all(spec.popen and not spec.python for spec in specs):
        return
    gc.disable()
    _import_tests(config.args)
    gc.enable()
    gc.collect()
    gc.freeze()
    forked: list[_Forked] = []
    for _ in specs:
        forked.append(_Forked(forked))

    class ForkedIO(gateway_io.Popen2IO):  # type: ignore[misc]
        def __init__(self, process: _Forked, execmodel: Any) -> None:
            super().__init__(process.to_child, process.from_child, execmodel)
            self.kill, self.wait = process.kill, process.wait

    start = gateway_io.create_io

    def create_io(spec: Any, execmodel: Any) -> Any:
        """Take a forked process; those that replace a dead one are started as usual."""
        return ForkedIO(forked.pop(0), execmodel) if forked else start(spec, execmodel)

    gateway_io.create_io = create_io
