"""The parent's side of a child process: start by command, death by pidfd, stop with a deadline."""

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec

from protocol.config import EngineConfig
from protocol.process.child_runtime import DUMP_SIGNAL

_MAX_CONFIG_BYTES = 32 * 1024
"""Fits into a pipe's buffer, so that writing it never waits for the child."""
_DEATH_TIMEOUT_S = 1.0
"""Longest wait from SIGKILL to the end. Only uninterruptible sleep takes longer, as on a broken
disk."""
_UNKNOWN_STATUS = 127


class ChildHandle:
    """A child process, alive or dead. After its death `close` closes the descriptors."""

    def __init__(self, pid: int, epoch: int, parent_write: int) -> None:
        """Watch a child and own `parent_write`, the end of its parent pipe; OSError closes it."""
        try:
            self.pidfd = os.pidfd_open(pid)
            """Readable as soon as the process is dead."""
        except OSError:
            os.close(parent_write)
            raise
        self.pid = pid
        self.epoch = epoch
        self.started_at = time.monotonic()
        self._parent_write = parent_write
        self._status: int | None = None

    def poll(self) -> int | None:
        """Reap a dead process; return its status, negative for a signal, or None while it runs."""
        if self._status is None:
            try:
                info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG)
            except ChildProcessError:  # reaped by other code, as where SIGCHLD is ignored
                self._status = _UNKNOWN_STATUS
            else:
                if info is not None:
                    has_exited = info.si_code == os.CLD_EXITED
                    self._status = info.si_status if has_exited else -info.si_status
        return self._status

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end, at most `timeout_s`; returns as `poll`."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        poller.poll(timeout_s * 1000)
        return self.poll()

    def kill(self) -> None:
        """Send SIGKILL; the pidfd makes sure that it hits this process and no other."""
        self._send_signal(signal.SIGKILL)

    def dump_stacks(self) -> None:
        """Make it print its stacks; only for a process that has written to its progress page."""
        self._send_signal(DUMP_SIGNAL)

    def _send_signal(self, number: int) -> None:
        if self.poll() is None:
            signal.pidfd_send_signal(self.pidfd, number)

    def stop(self, grace_s: float) -> int | None:
        """Close its parent pipe, wait for `grace_s`, then kill; None: it still exists 1 s later."""
        self.release()
        status = self.wait(grace_s)
        if status is None:
            self.kill()
            status = self.wait(_DEATH_TIMEOUT_S)
        self.close()
        return status

    def release(self) -> None:
        """Close the parent pipe, which asks the child to exit."""
        if self._parent_write >= 0:
            with contextlib.suppress(OSError):  # a fork of this process may keep EOF from it
                os.write(self._parent_write, b"\0")
            os.close(self._parent_write)
            self._parent_write = -1

    def close(self) -> None:
        """Close all descriptors; only after the end of the process."""
        self.release()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


class Child(ChildHandle):
    """A child that is started by command."""

    def __init__(
        self,
        module: str,
        config: EngineConfig,
        *,
        epoch: int,
        rank: int = 0,
        listen_fd: int | None = None,
        progress_fd: int | None = None,
        arguments: Sequence[str] = (),
    ) -> None:
        """Start `python -m module`; an OSError leaves nothing behind."""
        with ExitStack() as ours, ExitStack() as theirs:
            config_read = _config_pipe(config)
            theirs.callback(os.close, config_read)
            parent_read, parent_write = os.pipe()
            theirs.callback(os.close, parent_read)
            ours.callback(os.close, parent_write)
            fds = {
                "--config-fd": config_read,
                "--parent-fd": parent_read,
                "--listen-fd": listen_fd,
                "--progress-fd": progress_fd,
            }
            inherited = {flag: fd for flag, fd in fds.items() if fd is not None}
            numbers = {**inherited, "--epoch": epoch, "--rank": rank}
            flags = [word for flag, number in numbers.items() for word in (flag, str(number))]
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, *arguments, *flags],
                stdin=subprocess.DEVNULL,
                pass_fds=list(inherited.values()),
                env=_environment(),
                start_new_session=True,
            )
            ours.pop_all()
        try:
            super().__init__(process.pid, epoch, parent_write)
        except OSError:
            process.kill()
            process.wait(_DEATH_TIMEOUT_S)
            raise
        process.returncode = _UNKNOWN_STATUS  # from here on only `poll` reaps it


def rss_bytes(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _config_pipe(config: EngineConfig) -> int:
    """Return the read end of a pipe that holds the configuration; its write end is closed."""
    body = msgspec.msgpack.encode(config)
    assert len(body) <= _MAX_CONFIG_BYTES, "configuration too large for a pipe"
    read_fd, write_fd = os.pipe()
    try:
        os.set_blocking(write_fd, False)
        if os.write(write_fd, body) < len(body):
            raise OSError(errno.ENOBUFS, "this user's pipes have no room for the configuration")
    except OSError:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    return read_fd


def _environment() -> dict[str, str]:
    """Return the caller's environment with the engine's packages and without its settings."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TROIKA_")}
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
