"""Forks the processes of pytest-xdist from one that has imported the tests.

Imports take most of the time before the first test. Here one process imports the tests for all
others. These exit without destroying the imported modules, which would copy the shared memory.
"""

import atexit
import contextlib
import gc
import importlib
import os
import select
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from protocol.config.gpu_defaults import GPU_NODES
from tests.paths import ROOT

BOOTSTRAP = "import sys;exec(eval(sys.stdin.readline()))"
"""What execnet lets a process run that it starts: the process reads its program."""
_BLAS_THREADS = "OPENBLAS_NUM_THREADS"
_ENDS_OF_AN_IMPORT = (SystemExit, pytest.skip.Exception, pytest.fail.Exception)
HAS_GPU = any(map(os.path.exists, GPU_NODES))
"""A forked process could not use CUDA, which an import may have begun to use."""


class _Pipes:
    """The pipes between pytest's first process and one that runs tests."""

    def __init__(self) -> None:
        self.test_in, self.first_out = os.pipe()
        self.first_in, self.test_out = os.pipe()

    def close_first(self) -> None:
        os.close(self.first_in)
        os.close(self.first_out)

    def close_test(self) -> None:
        os.close(self.test_in)
        os.close(self.test_out)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Let execnet use forked processes instead of starting any."""
    if HAS_GPU or _num_threads() > 1:  # a debugger may have started some
        return
    if not all(spec.popen and not spec.python for spec in specs):
        return
    pipes = [_Pipes() for _ in specs]
    pids_in, pids_out = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() == 0:
        os.close(pids_in)
        _be_parent(config.args, pipes, pids_out)
    os.close(pids_out)
    for one in pipes:
        one.close_test()
    with os.fdopen(pids_in, "rb") as reader:
        pids = list(map(int, reader.read().split()))
    if len(pids) != len(pipes):
        raise pytest.UsageError("the process that imports the tests has died")
    _use(list(zip(pids, pipes, strict=True)))


def _use(forked: list[tuple[int, _Pipes]]) -> None:
    """Let execnet take these processes; those that replace a dead one are started as usual."""
    from execnet import gateway_base, gateway_io

    class ForkedIO(gateway_base.Popen2IO):
        """The first process's end of the link to a forked one."""

        def __init__(self, pid: int, pipes: _Pipes, execmodel: Any) -> None:
            writer, reader = os.fdopen(pipes.first_out, "wb"), os.fdopen(pipes.first_in, "rb")
            super().__init__(writer, reader, execmodel)
            self._pidfd = os.pidfd_open(pid)

        def wait(self) -> None:
            select.select([self._pidfd], [], [])

        def kill(self) -> None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    start = gateway_io.create_io

    def create_io(spec: Any, execmodel: Any) -> Any:
        return ForkedIO(*forked.pop(0), execmodel) if forked else start(spec, execmodel)

    gateway_io.create_io = create_io


def _be_parent(arguments: Iterable[str], pipes: Sequence[_Pipes], pids_out: int) -> NoReturn:
    """Import the tests, fork the processes that run them, and wait for their ends."""
    try:
        for one in pipes:
            one.close_first()
        gc.disable()
        with _without_blas_threads(), _silent():
            _import_tests(arguments)
            _read_constants()
        gc.collect()
        gc.freeze()
        gc.enable()
        num_threads = _num_threads()
        if num_threads > 1:
            print(f"importing the tests has started {num_threads - 1} threads", file=sys.stderr)
        create = _fork if num_threads == 1 else _start
        pids = [create(number, pipes, pids_out) for number in range(len(pipes))]
        for one in pipes:
            one.close_test()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.write(pids_out, " ".join(map(str, pids)).encode())
        os.close(pids_out)
        for _ in pids:
            os.wait()
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(0)


def _num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


@contextlib.contextmanager
def _without_blas_threads() -> Iterator[None]:
    """Let numpy start no threads when it is imported; other programs have their own number."""
    given = os.environ.get(_BLAS_THREADS)
    os.environ[_BLAS_THREADS] = "1"
    try:
        yield
    finally:
        del os.environ[_BLAS_THREADS]
        if given is not None:
            os.environ[_BLAS_THREADS] = given


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Drop what modules print on standard error when they are imported, as pytest does."""
    kept = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


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
                contextlib.suppress(Exception, *_ENDS_OF_AN_IMPORT),
                warnings.catch_warnings(action="error"),
            ):
                importlib.import_module(name)


def _read_constants() -> None:
    """Let hypothesis read the constants of all modules, as each process would do by itself."""
    if "hypothesis" in sys.modules:
        with contextlib.suppress(ImportError):  # older versions read none
            from hypothesis.internal.conjecture.providers import _get_local_constants

            _get_local_constants()


def _start(number: int, pipes: Sequence[_Pipes], _pids_out: int) -> int:
    """Start a process that imports the tests itself, since a fork has no threads but one."""
    own = pipes[number]
    command = [sys.executable, "-u", "-c", BOOTSTRAP]
    return subprocess.Popen(command, stdin=own.test_in, stdout=own.test_out).pid


def _fork(number: int, pipes: Sequence[_Pipes], pids_out: int) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            own = pipes[number]
            os.dup2(own.test_in, 0)
            os.dup2(own.test_out, 1)
            os.close(pids_out)
            for one in pipes:
                one.close_test()
            sys.stdin = open(0, closefd=False)  # noqa: SIM115
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            exec(eval(sys.stdin.readline()), {})
        except Exception:
            traceback.print_exc()
        finally:
            atexit._run_exitfuncs()
            os._exit(0)
    return pid
