"""Starts whole engines as a user would, with the null model, and waits for conditions."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from protocol.lifecycle import ProcessState, ProcessStatus, Role, StatusReply
from protocol.status import StatusLink
from scripts.chaos.processes import is_alive

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 20.0
LOAD_TIMEOUT_S = 90.0
"""For a model, where others compute too."""
_POLL_S = 0.01

T = TypeVar("T")


def eventually(condition: Callable[[], T | None], what: str, timeout_s: float = TIMEOUT_S) -> T:
    """The condition's first true value; fails when there is none in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(_POLL_S)


def has_pids(reply: StatusReply) -> bool:
    """Whether all that are ready have pids: a forked worker may say so before its zygote does."""
    ready = [row for row in reply.processes if row.state is ProcessState.READY]
    return all(row.pid is not None for row in ready)


class Engine:
    """One supervisor and its processes."""

    def __init__(self, run_dir: str, arguments: list[str], environ: dict[str, str]) -> None:
        self.run_dir = run_dir
        self._start_timeout_s = TIMEOUT_S if "null" in arguments else LOAD_TIMEOUT_S
        self._log = open(f"{run_dir}.log", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "scripts.supervisor", "--run-dir", run_dir, *arguments],
            cwd=ROOT,
            env=environ,
            stdin=subprocess.DEVNULL,
            stderr=self._log,
        )
        self._link = StatusLink(run_dir)
        self.all_pids: set[int] = set()
        """Of every process ever seen in this engine."""

    @property
    def log(self) -> str:
        """What it has written to stderr."""
        return Path(self._log.name).read_text()

    def status(self) -> StatusReply | None:
        """One answer; None if the supervisor does not give any."""
        reply = self._link.query(1.0)
        if reply is not None:
            self.all_pids |= {row.pid for row in reply.processes if row.pid is not None}
        return reply

    def ready(self) -> StatusReply:
        """Wait until every process is ready."""

        def ask() -> StatusReply | None:
            assert self.process.poll() is None, f"the supervisor has ended:\n{self.log}"
            reply = self.status()
            return reply if reply is not None and reply.ready and has_pids(reply) else None

        return eventually(ask, "the engine is ready", self._start_timeout_s)

    def row(self, role: Role, rank: int = 0) -> ProcessStatus:
        """One process of an engine that is ready."""
        rows = self.ready().processes
        return next(row for row in rows if row.role is role and row.rank == rank)

    def pid(self, role: Role, rank: int = 0) -> int:
        """Its pid."""
        pid = self.row(role, rank).pid
        assert pid is not None
        return pid

    def kill(self, role: Role, rank: int = 0) -> ProcessStatus:
        """SIGKILL one process and wait until it is replaced; returns its successor's row."""
        old = self.row(role, rank)
        os.kill(self.pid(role, rank), signal.SIGKILL)

        def replaced() -> ProcessStatus | None:
            new = self.row(role, rank)
            return new if new.epoch > old.epoch else None

        return eventually(replaced, f"{role} is replaced")

    def url(self) -> str:
        """Root of the HTTP server."""
        url = self.ready().url
        assert url is not None
        return url

    def get(self, path: str) -> Any:
        """GET as JSON."""
        with urllib.request.urlopen(self.url() + path, timeout=TIMEOUT_S) as response:
            return json.loads(response.read())

    def readiness(self) -> Any:
        """What /readyz says as soon as it says that requests are served.

        The API hears that from the core, later than the supervisor hears it from everybody.
        """

        def ask() -> Any:
            try:
                return self.get("/readyz")
            except urllib.error.HTTPError as error:
                error.close()
                if error.code != 503:
                    raise
                return None

        return eventually(ask, "requests are served")

    def post(self, path: str, **body: Any) -> Any:
        """POST JSON, get JSON."""
        request = urllib.request.Request(
            self.url() + path,
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return json.loads(response.read())

    def close(self) -> None:
        """End it whatever its state, and check that nothing of it is left."""
        self._link.close()
        self.process.kill()
        self.process.wait(TIMEOUT_S)
        self._log.close()
        eventually(lambda: not any(map(is_alive, self.all_pids)), "all processes are gone")


class EngineFactory:
    """Starts engines with run directories short enough for sockets."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.environ = {
            **{key: value for key, value in os.environ.items() if not key.startswith("TROIKA_")},
            "XDG_RUNTIME_DIR": base,
            "PYTHONPATH": str(ROOT),
        }
        self.engines: list[Engine] = []

    def __call__(self, *arguments: str, model: str = "null", run_dir: str = "") -> Engine:
        """Start one on a free port; it is not ready yet."""
        run_dir = run_dir or f"{self.base}/{len(self.engines)}"
        engine = Engine(run_dir, [model, "--port", "0", *arguments], self.environ)
        self.engines.append(engine)
        return engine

    def close(self) -> None:
        """End all of them."""
        for engine in self.engines:
            engine.close()


@pytest.fixture
def start_engine() -> Iterator[EngineFactory]:
    """Call it with flags to start an engine; all of them end with the test."""
    base = tempfile.mkdtemp(prefix="troika-test-")
    factory = EngineFactory(base)
    try:
        yield factory
    finally:
        factory.close()
        shutil.rmtree(base)


@pytest.fixture
def engine(start_engine: EngineFactory) -> Engine:
    """A ready engine with the null model."""
    started = start_engine()
    started.ready()
    return started
