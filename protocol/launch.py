"""Embedding: the engine's processes, without HTTP, as the property of the program that starts them.

    with EngineProcesses.start(configure(model="demo")) as engine:
        with EngineClient(engine.address) as client:
            ...

The host's signals, environment, event loop and logging stay untouched, and if the host dies in any
way, the engine's processes leave within 2 s.
"""

import shutil
import time
from pathlib import Path
from types import TracebackType

import msgspec

from protocol.channel import client_address, make_run_dir
from protocol.child import Child
from protocol.config import EngineConfig
from protocol.lifecycle import StatusReply
from protocol.status import StatusLink

FAILURE_FILE = "failure"
"""Where an embedded supervisor leaves word why it gave up, in the run directory."""
CLOSE_GRACE_S = 3.0
_SUPERVISOR = "scripts.supervisor"
_POLL_S = 0.02
_QUERY_TIMEOUT_S = 1.0


class EngineStartError(Exception):
    """The engine does not start; the text says why."""


class EngineProcesses:
    """A supervisor with a core and workers. Use it from one thread at a time."""

    def __init__(self, config: EngineConfig) -> None:
        """Start the processes; `start` waits for them too."""
        self._is_temporary = config.run.run_dir is None
        self.run_dir = make_run_dir(config.run.run_dir)
        self._failure_file.unlink(missing_ok=True)
        run = msgspec.structs.replace(config.run, run_dir=self.run_dir)
        arguments = ["--no-api", *(["--temporary-run-dir"] if self._is_temporary else [])]
        self._child: Child | None = Child(
            _SUPERVISOR,
            msgspec.structs.replace(config, run=run),
            epoch=0,
            arguments=arguments,
        )
        self._link = StatusLink(self.run_dir)

    @classmethod
    def start(cls, config: EngineConfig, *, timeout_s: float = 600.0) -> "EngineProcesses":
        """Start the processes and wait until all of them are ready.

        Raises:
            EngineStartError: they cannot start, or not within `timeout_s`; nothing is left behind.
        """
        engine = cls(config)
        try:
            engine._wait_ready(timeout_s)
        except BaseException:
            engine.close()
            raise
        return engine

    @property
    def address(self) -> str:
        """Where clients of the core connect."""
        return client_address(self.run_dir)

    def status(self, timeout_s: float = 2.0) -> StatusReply | None:
        """How the processes are; None if the supervisor is gone or does not answer in time."""
        if self._child is None:
            return None
        return self._link.query(timeout_s, self._child.pidfd)

    def close(self) -> None:
        """End all processes, in less than 5 s in any state. Harmless when repeated."""
        child, self._child = self._child, None
        if child is None:
            return
        self._link.close()
        child.stop(CLOSE_GRACE_S)
        self._failure_file.unlink(missing_ok=True)
        if self._is_temporary:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def __enter__(self) -> "EngineProcesses":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _failure_file(self) -> Path:
        return Path(self.run_dir) / FAILURE_FILE

    def _wait_ready(self, timeout_s: float) -> None:
        assert self._child is not None
        deadline = time.monotonic() + timeout_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            reply = self.status(min(remaining_s, _QUERY_TIMEOUT_S))
            if reply is not None and reply.ready:
                return
            status = self._child.wait(min(remaining_s, _POLL_S))
            if status is not None:
                raise EngineStartError(self._read_failure(status))
        raise EngineStartError(f"the engine is not ready after {timeout_s:g} s")

    def _read_failure(self, status: int) -> str:
        try:
            return self._failure_file.read_text()
        except OSError:
            return f"the supervisor ended with status {status}"
