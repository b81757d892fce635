"""Starts engines in tests, kills their processes and waits until they serve again.

With pytest: `pytest_plugins = ["scripts.testing"]` in the top conftest.py defines two fixtures:
`engine`, a ready engine with the null model, and `start_engine`, which starts others by flags.
Without it:

    with EngineFactory() as start_engine:
        engine = start_engine("--max-num-seqs", "8", model="demo")
        engine.kill(Role.WORKER)

`RunningEngine(run_dir)` does the same to an engine that the program itself has started.
"""

import contextlib
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from protocol.lifecycle import ProcessState, ProcessStatus, Role, StatusReply
from protocol.process.run_dir import client_address
from protocol.process.status import StatusLink

TIMEOUT_S = 20.0
LOAD_TIMEOUT_S = 90.0
"""The longest wait for engines with a model."""
_POLL_S = 0.01
_MAX_POLL_S = 0.05
_POLL_SHARE = 0.05
"""The pause after a check as a share of the wait so far: a status costs the supervisor time."""
_QUERY_TIMEOUT_S = 1.0
_PATH = str(Path(__file__).resolve().parents[1])

T = TypeVar("T")


def eventually(condition: Callable[[], T | None], what: str, timeout_s: float = TIMEOUT_S) -> T:
    """Wait for a condition and return its first true value; TimeoutError contains `what`.

    The condition is checked every 10 ms at first, and later less often, up to every 50 ms.
    """
    began = time.monotonic()
    while not (value := condition()):
        waited_s = time.monotonic() - began
        if waited_s >= timeout_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(min(max(_POLL_S, _POLL_SHARE * waited_s), _MAX_POLL_S))
    return value


def is_alive(pid: int) -> bool:
    """Return whether a thread of a process runs; one that only waits to be reaped does not."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return not poller.poll(0)
    finally:
        os.close(pidfd)


class RunningEngine:
    """Observes the processes of the engine in one run directory, and kills them."""

    def __init__(self, run_dir: str, timeout_s: float = TIMEOUT_S) -> None:
        """Attach; `timeout_s` bounds every wait for readiness."""
        self.run_dir = run_dir
        self.all_pids: set[int] = set()
        """Every process that a status has ever named."""
        self._timeout_s = timeout_s
        self._link = StatusLink(run_dir)

    @property
    def address(self) -> str:
        """The address that clients of the core connect to."""
        return client_address(self.run_dir)

    def status(self) -> StatusReply | None:
        """Return the supervisor's report; None if it does not answer within a second."""
        reply = self._link.query(_QUERY_TIMEOUT_S)
        if reply is not None:
            self.all_pids |= {row.pid for row in reply.processes if row.pid is not None}
        return reply

    def ready(self) -> StatusReply:
        """Wait until every process is ready."""

        def ask() -> StatusReply | None:
            self.check()
            reply = self.status()
            if reply is None or not reply.ready:
                return None
            # A forked worker may be ready before the zygote has reported its pid.
            ready = [row for row in reply.processes if row.state is ProcessState.READY]
            return reply if all(row.pid is not None for row in ready) else None

        return eventually(ask, "the engine is ready", self._timeout_s)

    def row(self, role: Role, rank: int = 0) -> ProcessStatus:
        """Return the status of one process of an engine that is ready; LookupError: it has none."""
        rows = self.ready().processes
        found = [row for row in rows if (row.role, row.rank) == (role, rank)]
        if not found:
            names = ", ".join(row.name for row in rows)
            raise LookupError(f"the engine has no {role} with rank {rank}; it has: {names}")
        return found[0]

    def pid(self, role: Role, rank: int = 0) -> int:
        """Return the pid of one process of an engine that is ready."""
        pid = self.row(role, rank).pid
        assert pid is not None
        return pid

    def kill(
        self, role: Role, rank: int = 0, number: signal.Signals = signal.SIGKILL
    ) -> ProcessStatus:
        """Send a fatal signal to one process and wait until its successor serves.

        ValueError: the supervisor has no successor; the engine ends with it.
        """
        if role is Role.SUPERVISOR:
            raise ValueError("a killed supervisor is not replaced: its engine ends with it")
        old = self.row(role, rank)
        assert old.pid is not None
        os.kill(old.pid, number)

        def replaced() -> ProcessStatus | None:
            new = self.row(role, rank)
            return new if new.epoch > old.epoch else None

        return eventually(replaced, f"{role} is replaced", self._timeout_s)

    def url(self) -> str:
        """Return the root of the HTTP server of an engine that has one."""
        url = self.ready().url
        assert url is not None
        return url

    def get(self, path: str) -> Any:
        """GET a path and decode the JSON reply."""
        return self._reply_to(path)

    def post(self, path: str, **body: Any) -> Any:
        """POST a JSON body and decode the JSON reply."""
        return self._reply_to(path, json.dumps(body).encode())

    def _reply_to(self, path: str, body: bytes | None = None) -> Any:
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self.url() + path, body, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
            return json.loads(response.read())

    def readiness(self) -> Any:
        """Wait for the reply 200 of /readyz: the API is ready later than the supervisor reports."""

        def ask() -> Any:
            try:
                return self.get("/readyz")
            except urllib.error.HTTPError as error:
                error.close()
                if error.code != 503:
                    raise
                return None

        return eventually(ask, "requests are served", self._timeout_s)

    def close(self) -> None:
        """Detach; the engine continues."""
        self._link.close()

    def check(self) -> None:
        """Raise a RuntimeError if the engine is known to have ended."""


class Engine(RunningEngine):
    """An engine that runs as a child process until it is closed, or until this process ends."""

    def __init__(
        self,
        run_dir: str,
        arguments: list[str],
        environ: dict[str, str],
        timeout_s: float | None = None,
        *,
        module: str = "scripts.supervisor",
        prefix: Sequence[str] = (),
    ) -> None:
        """Start it with the arguments of `scripts/serve`, or of another module's command.

        It is not ready yet. `prefix`: words in front of the command, such as `ip netns exec`.
        """
        default_s = TIMEOUT_S if "null" in arguments else LOAD_TIMEOUT_S
        super().__init__(run_dir, default_s if timeout_s is None else timeout_s)
        self._log = Path(f"{run_dir}.log")
        parent_read, self._parent_write = os.pipe()  # its EOF ends the engine
        flags = ["--run-dir", run_dir, "--parent-fd", str(parent_read)]
        try:
            with self._log.open("w") as log:
                self.process = subprocess.Popen(
                    [*prefix, sys.executable, "-m", module, *flags, *arguments],
                    cwd=_PATH,
                    env=environ,
                    stdin=subprocess.DEVNULL,
                    stderr=log,
                    pass_fds=[parent_read],
                )
        except BaseException:
            os.close(self._parent_write)
            raise
        finally:
            os.close(parent_read)

    @property
    def log(self) -> str:
        """The text that its processes have written to stderr."""
        return self._log.read_text()

    def check(self) -> None:
        if self.process.poll() is not None:
            raise RuntimeError(f"the engine has ended:\n{self.log}")

    def close(self) -> None:
        """Kill the supervisor, and check that all other processes leave."""
        super().close()
        self.process.kill()
        if self._parent_write >= 0:
            os.close(self._parent_write)
            self._parent_write = -1
        self.process.wait(TIMEOUT_S)
        eventually(lambda: not any(map(is_alive, self.all_pids)), "all processes are gone")


class EngineFactory:
    """Starts engines in one temporary directory, and ends all of them with its context.

    They are not visible to `scripts.status` of this user, and `TROIKA_*` variables of the caller
    do not reach them.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        # The name is short enough for the sockets in it.
        self.base = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="troika-test-"))
        self.environ = {k: v for k, v in os.environ.items() if not k.startswith("TROIKA_")}
        self.environ["XDG_RUNTIME_DIR"] = self.base
        paths = [_PATH, self.environ.get("PYTHONPATH", "")]
        self.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self._numbers = itertools.count()

    def __call__(
        self,
        *arguments: str,
        model: str = "null",
        run_dir: str = "",
        timeout_s: float | None = None,
    ) -> Engine:
        """Start an engine with a free port; it is not ready yet.

        `timeout_s` bounds every wait for readiness; the default depends on the model.
        """
        run_dir = run_dir or f"{self.base}/{next(self._numbers)}"
        arguments = (model, "--port", "0", *arguments)
        engine = Engine(run_dir, list(arguments), self.environ, timeout_s)
        self._stack.callback(engine.close)
        return engine

    def agent(self, join: str, keys: Path, *arguments: str, prefix: Sequence[str] = ()) -> Engine:
        """Start a host agent for the engine that listens at `join` for agents."""
        run_dir = f"{self.base}/{next(self._numbers)}"
        flags = ["--join", join, "--curve-keys", str(keys), *arguments]
        engine = Engine(run_dir, flags, self.environ, module="scripts.agent", prefix=prefix)
        self._stack.callback(engine.close)
        return engine

    def __enter__(self) -> "EngineFactory":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all engines and remove the directory."""
        self._stack.close()


try:
    import pytest
except ImportError:  # the fixtures need it, and nothing else here
    pass
else:

    @pytest.fixture
    def start_engine() -> Iterator[EngineFactory]:
        """Call it with flags to start an engine; all of them end with the test."""
        with EngineFactory() as factory:
            yield factory

    @pytest.fixture
    def engine(start_engine: EngineFactory) -> Engine:
        """A ready engine with the null model."""
        started = start_engine()
        started.ready()
        return started
