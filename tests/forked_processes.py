"""A pytest plugin that runs the tests in several processes: `--processes 4`.

The processes are forked once all tests are collected, so the libraries are imported and the tests
collected once. Each process runs whole files, one after the other, in the order of the collection.
A process that dies fails the test that it ran, and another one goes on with those it had left.
"""

import contextlib
import gc
import os
import signal
import traceback
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any

import pytest
from _pytest import runner

END_S = 30.0
"""Longest wait for processes that are asked to end, which close their fixtures before."""
_NUM_THREADS = "OMP_NUM_THREADS"
_given_threads = os.environ.get(_NUM_THREADS)
# Libraries that are imported now start no threads while tests are collected: a forked process would
# wait for ever for the threads that its parent has.
os.environ[_NUM_THREADS] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processes",
        type=int,
        default=0,
        metavar="N",
        help="run the tests in N forked processes, each file in one of them",
    )


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Take the place of pytest's own loop if processes are wanted."""
    if _given_threads is None:
        os.environ.pop(_NUM_THREADS, None)  # the processes that tests start have their own number
    else:
        os.environ[_NUM_THREADS] = _given_threads
    num_processes = session.config.getoption("processes")
    if not num_processes or session.config.option.collectonly or session.testsfailed:
        return None
    gc.collect()
    gc.freeze()  # the processes share what is collected and imported
    Distribution(session).run(num_processes)
    return True


class Process:
    """A forked process, as its parent sees it."""

    def __init__(self, pid: int, link: Connection, places: list[int]) -> None:
        self.pid, self.link, self.pidfd = pid, link, os.pidfd_open(pid)
        self.assigned = deque(places)
        """Tests that it has not begun, by their places in the session."""
        self.running: pytest.Item | None = None


class Distribution:
    """Gives files to processes, and passes their reports on."""

    def __init__(self, session: pytest.Session) -> None:
        self._session, self._hook = session, session.config.hook
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        by_file: dict[Path, list[int]] = {}
        for place, item in enumerate(session.items):
            by_file.setdefault(item.path, []).append(place)
        self._files = deque(by_file.values())
        self._processes: list[Process] = []
        self._num_forks = 0

    def run(self, num_processes: int) -> None:
        """Return when all tests have run; raise if the session is to stop before."""
        try:
            for _ in range(min(num_processes, len(self._files))):
                self._fork()
            while self._processes:
                ready = wait([each for p in self._processes for each in (p.link, p.pidfd)])
                for process in [p for p in self._processes if {p.link, p.pidfd} & {*ready}]:
                    # What it has started may hold its end of the link open.
                    if not self._receive(process) or process.pidfd in ready:
                        self._reap(process)
                if self._session.shouldfail:
                    raise self._session.Failed(self._session.shouldfail)
        finally:
            self._end()

    def _fork(self) -> None:
        places = self._files.popleft()
        ours, theirs = Pipe()
        self._num_forks += 1
        pid = os.fork()
        if pid == 0:
            ours.close()
            for other in self._processes:
                other.link.close()
                os.close(other.pidfd)
            run_forked(self._session, self._num_forks, theirs, places)
        theirs.close()
        self._processes.append(Process(pid, ours, places))

    def _receive(self, process: Process) -> bool:
        """Handle what a process has sent; returns whether it still runs."""
        try:
            while process.link.poll():
                self._handle(process, *process.link.recv())
        except (EOFError, OSError):
            return False
        return True

    def _handle(self, process: Process, kind: str, value: Any) -> None:
        match kind:
            case "start":
                item = process.running = self._session.items[process.assigned.popleft()]
                self._hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
            case "report":
                report = self._hook.pytest_report_from_serializable(
                    config=self._session.config, data=value
                )
                self._hook.pytest_runtest_logreport(report=report)
            case "finish":
                item, process.running = process.running, None
                assert item is not None
                self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
            case "next":
                places = self._files.popleft() if self._files else []
                process.assigned.extend(places)
                process.link.send(places)

    def _reap(self, process: Process) -> None:
        """Report the test in which a process died, and let another one run the rest."""
        _, status = os.waitpid(process.pid, 0)
        self._processes.remove(process)
        process.link.close()
        os.close(process.pidfd)
        code = os.waitstatus_to_exitcode(status)
        cause = f"signal {-code}" if code < 0 else f"exit status {code}"
        item = process.running
        if code and item is None:
            raise self._session.Failed(f"a process ended between two tests: {cause}")
        if item is not None:
            report = pytest.TestReport(
                item.nodeid, item.location, {}, "failed", f"the process ended: {cause}", "call"
            )
            self._hook.pytest_runtest_logreport(report=report)
            self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        if process.assigned:
            self._files.appendleft([*process.assigned])
        if code and self._files:
            self._fork()

    def _end(self) -> None:
        """Interrupt the processes that still run, and wait for them."""
        for process in self._processes:
            os.kill(process.pid, signal.SIGINT)
        for process in self._processes:
            if not wait([process.pidfd], END_S):
                os.kill(process.pid, signal.SIGKILL)
            os.waitpid(process.pid, 0)


class Reports:
    """In a forked process: sends its reports; pytest asks it for the terminal."""

    def __init__(self, config: pytest.Config, link: Connection) -> None:
        self._config, self._link = config, link
        self._tw = config.get_terminal_writer()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._link.send(("report", data))


def run_forked(session: pytest.Session, number: int, link: Connection, places: list[int]) -> None:
    """Run tests in a process that was just forked, and end it."""
    status = 1
    try:
        _prepare(session, number, link)
        with contextlib.suppress(KeyboardInterrupt):
            try:
                for item, following in _with_following(session, link, places):
                    link.send(("start", None))
                    item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                    link.send(("finish", None))
                status = 0
            finally:
                runner.pytest_sessionfinish(session)  # closes the fixtures that are open
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _prepare(session: pytest.Session, number: int, link: Connection) -> None:
    """Separate the process from its siblings."""
    config = session.config
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    reports = Reports(config, link)
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(reports, "terminalreporter")
    factory = config._tmp_path_factory  # type: ignore[attr-defined]
    factory._basetemp = factory.getbasetemp() / f"p{number}"
    factory._basetemp.mkdir()


def _with_following(
    session: pytest.Session, link: Connection, places: list[int]
) -> Iterator[tuple[pytest.Item, pytest.Item | None]]:
    """Yield each test and the one after it, by which pytest knows the fixtures to keep.

    More tests are asked for before the last one begins.
    """
    items = deque(session.items[place] for place in places)
    while items:
        item = items.popleft()
        if not items:
            link.send(("next", None))
            items.extend(session.items[place] for place in link.recv())
        yield item, items[0] if items else None
