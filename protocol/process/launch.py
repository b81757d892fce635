"""Embedding: the engine's processes, without HTTP, owned by the program that starts them.

    with EngineProcesses.start(configure(model="demo")) as engine:
        with EngineClient(engine.address) as client:
            ...

The host's signal handlers, environment, event loop and logging stay unchanged. If the host dies in
any way, the engine's processes exit within 2 s.
"""

import os
import shutil
import threading
import time
from pathlib import Path

import msgspec

from protocol.config import EngineConfig
from protocol.lifecycle import Role, StatusReply
from protocol.process.child_handle import Child
from protocol.process.run_dir import core_addresses, make_run_dir
from protocol.process.status import StatusLink

CLOSE_GRACE_S = 3.0
_POLL_S = 0.02
_QUERY_TIMEOUT_S = 1.0


class EngineStartError(Exception):
    """The engine does not start; the text gives the reason."""


def failure_file(run_dir: str, pid: int) -> Path:
    """Return the file in which the embedded supervisor with this pid writes why it gave up."""
    return Path(run_dir) / f"failure-{pid}"


def fetching_file(run_dir: str, pid: int) -> Path:
    """Return the file that exists while the supervisor with this pid fetches a model."""
    return Path(run_dir) / f"fetching-{pid}"


class EngineProcesses:
    """A supervisor with a core and workers. Any thread may close it, and query its status."""

    def __init__(self, config: EngineConfig, *, with_api: bool = False) -> None:
        """Start the processes, with an HTTP server if asked; `start` waits until they are ready.

        EngineStartError: they cannot be started; nothing is left behind.
        """
        self._is_temporary = config.run.run_dir is None
        self._num_replicas = config.parallel.data_parallel_size
        try:
            self.run_dir = make_run_dir(config.run.run_dir)
        except (OSError, ValueError) as error:
            raise EngineStartError(str(error)) from error
        run = msgspec.structs.replace(config.run, run_dir=self.run_dir)
        config = msgspec.structs.replace(config, run=run)
        arguments = [] if with_api else ["--no-api"]
        arguments += ["--temporary-run-dir"] if self._is_temporary else []
        self._link = StatusLink(self.run_dir)
        self._child: Child | None = None
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()
        try:
            self._child = Child("scripts.supervisor", config, epoch=0, arguments=arguments)
        except OSError as error:
            self._clear()
            raise EngineStartError(f"the supervisor cannot be started: {error}") from error

    @classmethod
    def start(
        cls, config: EngineConfig, *, timeout_s: float = 600.0, with_api: bool = False
    ) -> "EngineProcesses":
        """Start the processes and wait until all of them are ready.

        EngineStartError: they cannot start, or not within `timeout_s`, which does not count while a
        model is fetched from a hub; nothing is left behind.
        """
        engine = cls(config, with_api=with_api)
        try:
            engine._wait_ready(timeout_s)
        except BaseException:
            engine.close()
            raise
        return engine

    @property
    def address(self) -> str:
        """The address for clients of the core; with replicas, of the first one's core."""
        return self.addresses[0]

    @property
    def addresses(self) -> list[str]:
        """The addresses for clients of the cores of all replicas."""
        return core_addresses(self.run_dir, self._num_replicas)

    @property
    def pidfd(self) -> int:
        """A descriptor that is readable once the supervisor has ended; valid until `close`."""
        return -1 if self._child is None else self._child.pidfd

    @property
    def is_fetching(self) -> bool:
        """Whether a model is being fetched from a hub; no other process has been started yet."""
        return self._child is not None and fetching_file(self.run_dir, self._child.pid).exists()

    def status(self, timeout_s: float = 2.0) -> StatusReply | None:
        """Query the processes; None if the supervisor is gone or does not answer in time.

        Replies of another engine in the same run directory are ignored.
        """
        child = self._child
        if child is None:
            return None
        reply = self._link.query(timeout_s, child.pidfd)
        rows = () if reply is None else reply.processes
        is_ours = any(row.role is Role.SUPERVISOR and row.pid == child.pid for row in rows)
        return reply if is_ours else None

    def close(self) -> None:
        """End all processes, in less than 5 s in any state. Idempotent.

        Calls of `status` under way return None. In a fork of the starting process it does nothing.
        """
        with self._lock:
            if self._child is None or os.getpid() != self._owner_pid:
                return
            self._child.stop(CLOSE_GRACE_S)
            failure_file(self.run_dir, self._child.pid).unlink(missing_ok=True)
            self._child = None  # last: after an interrupt it may be called again
            self._clear()

    def __enter__(self) -> "EngineProcesses":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _clear(self) -> None:
        self._link.close()
        if self._is_temporary:
            shutil.rmtree(self.run_dir, ignore_errors=True)

    def check(self) -> None:
        """Raise EngineStartError, with the reason, if the supervisor has ended."""
        child = self._child
        status = None if child is None else child.poll()
        if child is None or status is None:
            return
        try:
            text = failure_file(self.run_dir, child.pid).read_text()
        except OSError:
            text = f"the supervisor ended with status {status}"
        raise EngineStartError(text)

    def _wait_ready(self, timeout_s: float) -> None:
        assert self._child is not None
        deadline = time.monotonic() + timeout_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            if self.is_fetching:  # the supervisor bounds it
                deadline = time.monotonic() + timeout_s
            reply = self.status(min(remaining_s, _QUERY_TIMEOUT_S))
            if reply is not None and reply.ready:
                return
            self._child.wait(min(remaining_s, _POLL_S))
            self.check()
        raise EngineStartError(f"the engine is not ready after {timeout_s:g} s")
