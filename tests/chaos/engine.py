"""One real engine for a chaos run: started by command, with failpoints that can be armed."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

from protocol.lifecycle import ProcessState, StatusReply
from protocol.process import failpoints
from protocol.process.run_dir import client_address
from tests.chaos import processes
from tests.chaos.client import Declined, StreamClient
from tests.chaos.members import Member, Members
from tests.paths import ROOT
from tests.ports import free_port

T = TypeVar("T")

READY_TIMEOUT_S = 120.0
_STATUS_TIMEOUT_S = 1.0
_POLL_S = 0.02
_MARK = "_TROIKA_ENGINE"
"""In the environment of every process of an engine, however it was started."""
_STOP_TIMEOUT_S = 20.0
JOURNAL_FLAGS = ("--resume-window-s", "3")
"""Long enough to reconnect, and not much longer: abandoned requests are kept this long."""
KEPT_FILES = frozenset({"epoch", "supervisor.lock"})
"""Files in a run directory, or in that of a replica, after a clean shutdown."""
_SAMPLE = re.compile(
    r"^troika:(?:num_requests_running|num_requests_waiting|kv_cache_usage_perc)"
    r"(?:\{[^}]*\})? (\S+)$",
    re.M,
)
_REPORT_S = 1.1
"""The core reports its status once a second."""


class EngineFailed(Exception):
    """The engine does not start, or does not become ready again."""


class Firing(NamedTuple):
    """One line of the failpoints' log."""

    time: float
    """Monotonic seconds."""
    name: str
    pid: int
    action: str


class Engine:
    """A supervisor with its processes, in a directory of its own."""

    def __init__(
        self,
        base: Path,
        arguments: Sequence[str],
        *,
        has_journal: bool = False,
        has_failpoints: bool = True,
    ) -> None:
        """Prepare an engine.

        Args:
            base: an empty directory with a short path.
            arguments: the model and flags for the supervisor.
            has_journal: keep a journal; the engine's client then resumes broken streams.
            has_failpoints: let `arm` work; it costs each process a system call per failpoint.
        """
        self._base = base
        self.run_dir = base / "run"
        self.failpoints = base / "failpoints"
        self.failpoints.mkdir()
        self.log_file = base / "engine.log"
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.has_journal = has_journal
        self.client = StreamClient(self.url, resumes=has_journal)
        journal = ("--journal-dir", str(base / "journal"), *JOURNAL_FLAGS) if has_journal else ()
        self._command = [sys.executable, "-m", "scripts.supervisor", *journal, *arguments]
        self._command += ["--run-dir", str(self.run_dir), "--port", str(self.port)]
        self._environ = {k: v for k, v in os.environ.items() if not k.startswith("TROIKA_")}
        self._environ["XDG_RUNTIME_DIR"] = str(base)
        self._environ[_MARK] = str(base)
        if has_failpoints:
            self._environ[failpoints.VARIABLE] = str(self.failpoints)
        self._executor = ThreadPoolExecutor(1)
        self._process: subprocess.Popen[bytes] | None = None
        self._members: Members | None = None

    def start(self) -> None:
        """Start a supervisor; does not wait until it is ready."""
        assert self._process is None
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, cwd=ROOT, env=self._environ, stdin=subprocess.DEVNULL, stderr=log
            )
        self._members = Members(str(self.run_dir), _STATUS_TIMEOUT_S)

    @property
    def address(self) -> str:
        """The address for clients of the core."""
        return client_address(str(self.run_dir))

    @property
    def supervisor_pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    async def status(self) -> StatusReply | None:
        """Query the supervisors once; None if the outer one does not answer.

        The reply has the processes of all replicas, and is ready if all of them are.
        """
        assert self._members is not None
        return await self._in_thread(self._members.whole)

    async def ready(
        self, timeout_s: float = READY_TIMEOUT_S, *, without: Collection[int] = ()
    ) -> StatusReply:
        """Wait until every process is ready, standbys included.

        Args:
            timeout_s: the longest wait.
            without: pids of dead processes; a supervisor that still lists one has not noticed its
                death.

        Raises:
            EngineFailed: the supervisor has ended, or the wait takes too long.
        """
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                text = f"the supervisor has ended with {self._process.returncode}"
                raise EngineFailed(f"{text}:\n{self.log_tail()}")
            reply = await self.status()
            if reply is not None and is_whole(reply, without):
                return reply
            await asyncio.sleep(_POLL_S)
        raise EngineFailed(f"not ready within {timeout_s:g} s:\n{self.log_tail()}")

    async def pids(self, role: str) -> list[int]:
        """Return the living processes of a role, in all replicas."""
        return [member.pid for member in await self.members(role)]

    async def members(self, role: str) -> list[Member]:
        """Return the living processes of a role, in the order of replicas and ranks."""
        if role == "supervisor":
            return [Member(role, None, 0, self.supervisor_pid)]
        assert self._members is not None
        return await self._in_thread(self._members.living, role)

    async def replica(self, number: int) -> list[Member]:
        """Return the living processes of a replica, its supervisor first."""
        assert self._members is not None
        return await self._in_thread(self._members.of_replica, number)

    async def _in_thread(self, query: Callable[..., T], *arguments: object) -> T:
        """Run a query of the supervisors, one after the other."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, query, *arguments)

    async def roles(self) -> set[str]:
        """Wait until the engine is ready and return its roles."""
        reply = await self.ready()
        return {str(row.role) for row in reply.processes}

    async def is_idle(self, timeout_s: float, *, has_news: bool = False) -> bool:
        """Wait until the engine reports that it holds no request and no block.

        Args:
            timeout_s: the longest wait.
            has_news: require the report for a full interval: a new process reports zero until its
                first real report.

        Returns:
            False if it does not within `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        idle_since: float | None = None
        while time.monotonic() < deadline:
            try:
                counts = _SAMPLE.findall(await self.client.get("/metrics", timeout_s=1.0))
            except (OSError, Declined):
                counts = []
            if not counts or any(map(float, counts)):
                idle_since = None
            else:
                idle_since = idle_since or time.monotonic()
                if time.monotonic() >= idle_since + has_news * _REPORT_S:
                    return True
            await asyncio.sleep(0.05)
        return False

    def arm(self, name: str, order: str) -> None:
        """Arm a failpoint in all present and future processes."""
        failpoints.arm(self.failpoints, name, order)

    def release(self, name: str, pid: int) -> bool:
        """Let a paused process continue; returns False if its pause had ended by itself."""
        return failpoints.release(self.failpoints, name, pid)

    def disarm(self) -> None:
        """Disarm every failpoint that has not fired, and end all pauses."""
        failpoints.disarm(self.failpoints)

    def firings(self, since: float) -> list[Firing]:
        """Return the firings since a monotonic time, in order."""
        file = self.failpoints / failpoints.LOG_FILE
        lines = file.read_text().splitlines() if file.exists() else []
        found = []
        for line in lines:
            moment, name, pid, action = line.split()
            if float(moment) >= since:
                found.append(Firing(float(moment), name, int(pid), action))
        return found

    def living(self) -> set[int]:
        """Return the living processes that were ever started for this engine."""
        return processes.living_with(_MARK, str(self._base))

    def files(self) -> set[str]:
        """Return what is in the run directory and in those of replicas, except `KEPT_FILES`."""
        return {
            str(entry.relative_to(self.run_dir))
            for entry in self.run_dir.rglob("*")
            if entry.name not in KEPT_FILES and not entry.match("replica-*")
        }

    def surroundings(self) -> set[str]:
        """Return the names beside the run directory: directories, and registers of supervisors.

        The pid of the current supervisor is removed from the names.
        """
        found = {entry.name for entry in self._base.iterdir()}
        for register in self._base.glob("troika-*"):
            names = (entry.name for entry in register.iterdir())
            pid = "" if self._process is None else f"-{self.supervisor_pid}"
            found |= {f"{register.name}/{n.removesuffix(pid)}" for n in names}
        return found

    def reap(self) -> None:
        """Reap the supervisor after its death, so that another one can be started."""
        assert self._process is not None
        assert self._members is not None
        self._process.wait(_STOP_TIMEOUT_S)
        self._members.close()
        self._process = self._members = None

    def stop(self) -> int | None:
        """Shut down, by SIGKILL after a timeout; returns the exit status."""
        if self._process is None:
            return None
        self._process.send_signal(signal.SIGTERM)
        try:
            status: int | None = self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = None
        self.reap()
        return status

    def close(self) -> None:
        """Kill all processes that are left."""
        self.disarm()
        self.stop()
        for pid in self.living():
            processes.kill(pid)
        self._executor.shutdown(wait=False)

    def log_tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-15:])


def is_whole(reply: StatusReply, without: Collection[int] = ()) -> bool:
    """Return whether every process is ready, and none is in `without`."""
    rows = reply.processes
    are_ready = all(row.state is ProcessState.READY for row in rows)
    return reply.ready and are_ready and not any(row.pid in without for row in rows)
