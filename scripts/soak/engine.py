"""The engine under a soak: a supervisor with all processes, the null model and a free port."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protocol.channel import client_address
from protocol.lifecycle import ProcessState, ProcessStatus, StatusReply
from protocol.status import StatusLink
from scripts.chaos import processes
from scripts.testing import is_alive

ROOT = Path(__file__).resolve().parents[2]
_MARK = "_TROIKA_SOAK"
"""In the environment of every process of the engine, however it was started."""
_STATUS_TIMEOUT_S = 1.0
_POLL_S = 0.01
_STOP_TIMEOUT_S = 20.0


class EngineLost(Exception):
    """It does not start, or does not come back."""


class SoakEngine:
    """Start it once, then ask and kill."""

    def __init__(self, base: Path, arguments: Sequence[str]) -> None:
        """Start the engine; it is not ready yet.

        Args:
            base: an empty directory with a short path.
            arguments: the model and flags for the supervisor.
        """
        self.run_dir = base / "run"
        self.log_file = base / "engine.log"
        self._mark = str(base)
        environ = {k: v for k, v in os.environ.items() if not k.startswith("TROIKA_")}
        environ |= {"XDG_RUNTIME_DIR": str(base), _MARK: self._mark}
        command = [sys.executable, "-m", "scripts.supervisor", *arguments]
        command += ["--run-dir", str(self.run_dir), "--port", "0"]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stderr=log
            )
        self._link = StatusLink(str(self.run_dir))
        self._executor = ThreadPoolExecutor(1)

    @property
    def address(self) -> str:
        """Where clients of the core connect."""
        return client_address(str(self.run_dir))

    async def status(self) -> StatusReply | None:
        """Ask the supervisor once; None if it does not answer."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._link.query, _STATUS_TIMEOUT_S)

    async def ready(self, timeout_s: float) -> StatusReply:
        """Wait until every process is ready, those in waiting included.

        Raises:
            EngineLost: it has ended, or takes too long.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise EngineLost(f"the supervisor has ended:\n{self.log_tail()}")
            reply = await self.status()
            if reply is not None and reply.ready and all(map(_is_ready, reply.processes)):
                return reply
            await asyncio.sleep(_POLL_S)
        raise EngineLost(f"not ready within {timeout_s:g} s:\n{self.log_tail()}")

    async def strike(self, role: str, number: signal.Signals, timeout_s: float) -> int:
        """Send a signal to a ready process of a role, as soon as there is one; returns its pid.

        Raises:
            EngineLost: there is none within the timeout.
        """
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            reply = await self.status()
            for row in [] if reply is None else reply.processes:
                if str(row.role) != role or not _is_ready(row):
                    continue
                if row.pid is not None and processes.kill(row.pid, number) is not None:
                    return row.pid
            await asyncio.sleep(_POLL_S)
        raise EngineLost(f"no {role} to strike within {timeout_s:g} s:\n{self.log_tail()}")

    async def wait_gone(self, pid: int, timeout_s: float) -> float:
        """Wait until a process does not live any more; returns the seconds.

        Raises:
            EngineLost: it lives on.
        """
        began = time.monotonic()
        while is_alive(pid):
            if time.monotonic() > began + timeout_s:
                text = f"process {pid} hangs for {timeout_s:g} s and is not replaced"
                raise EngineLost(f"{text}:\n{self.log_tail()}")
            await asyncio.sleep(_POLL_S)
        return time.monotonic() - began

    def living(self) -> set[int]:
        """All processes that were ever started for this engine and live."""
        return processes.living_with(_MARK, self._mark)

    def close(self) -> int | None:
        """End everything; returns the supervisor's exit status, None if it had to be killed."""
        self._process.send_signal(signal.SIGTERM)
        try:
            status: int | None = self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_TIMEOUT_S)
            status = None
        for pid in self.living():
            processes.kill(pid)
        self._executor.shutdown()
        self._link.close()
        return status

    def log_tail(self) -> str:
        """The last lines that it has written."""
        return "\n".join(self.log_file.read_text(errors="replace").splitlines()[-15:])


def _is_ready(row: ProcessStatus) -> bool:
    return row.state is ProcessState.READY
