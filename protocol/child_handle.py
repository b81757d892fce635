"""The parent's side of a process: start by command, death by pidfd, stop with a deadline."""

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

from protocol.child_runtime import DUMP_SIGNAL
from protocol.config import EngineConfig

_MAX_CONFIG_BYTES = 32 * 1024
"""Fits into a pipe's buffer, so that writing it never waits for the child."""
_DEATH_TIMEOUT_S = 1.0
"""From SIGKILL to the end; longer only in uninterruptible sleep, as on a broken disk."""


class Child:
    """One running process. Descriptors are closed with `close`, after its death."""

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
        """Start `python -m module`; the caller's signals, environment and loop stay untouched.

        Raises:
            OSError: it cannot be started; nothing is left behind.
        """
        with ExitStack() as ours, ExitStack() as theirs:
            config_read = _config_pipe(config)
            theirs.callback(os.close, config_read)
            parent_read, parent_write = os.pipe()
            theirs.callback(os.close, parent_read)
            ours.callback(os.close, parent_write)
            inherited = [config_read, parent_read]
            command = [sys.executable, "-P", "-m", module, *arguments]
            command += ["--config-fd", str(config_read), "--parent-fd", str(parent_read)]
            command += ["--epoch", str(epoch), "--rank", str(rank)]
            for flag, fd in (("--listen-fd", listen_fd), ("--progress-fd", progress_fd)):
                if fd is not None:
                    inherited.append(fd)
                    command += [flag, str(fd)]
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                pass_fds=inherited,
                env=_environment(),
                start_new_session=True,
            )
            ours.callback(_end, self._process)
            self.pid = self._process.pid
            self.pidfd = os.pidfd_open(self.pid)
            """Readable as soon as the process is dead."""
            ours.pop_all()
        self._parent_write = parent_write
        self.epoch = epoch
        self.started_at = time.monotonic()

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for the end, at most so long."""
        poller = select.poll()
        poller.register(self.pidfd, select.POLLIN)
        poller.poll(timeout_s * 1000)
        return self.poll()

    def kill(self) -> None:
        """Send SIGKILL; the pidfd makes sure that it hits this process and no other."""
        if self.poll() is None:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def dump_stacks(self) -> None:
        """Have it print its stacks; only for a process that has reported in its progress page."""
        if self.poll() is None:
            signal.pidfd_send_signal(self.pidfd, DUMP_SIGNAL)

    def stop(self, grace_s: float) -> int | None:
        """End it: close its parent pipe, wait for `grace_s`, then kill.

        Returns:
            The exit status; None if the system has not let go of it 1 s after SIGKILL.
        """
        self.release()
        status = self.wait(grace_s)
        if status is None:
            self.kill()
            status = self.wait(_DEATH_TIMEOUT_S)
        self.close()
        return status

    def release(self) -> None:
        """Let the child see the end of its parent pipe."""
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

    def rss_bytes(self) -> int:
        """Resident memory; 0 if the process is gone."""
        return rss_bytes(self.pid)


def rss_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def _config_pipe(config: EngineConfig) -> int:
    """The read end of a pipe that holds the configuration; nobody has its write end."""
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


def _end(process: subprocess.Popen[bytes]) -> None:
    """For a process that was started but cannot be watched."""
    process.kill()
    process.wait(_DEATH_TIMEOUT_S)


def _environment() -> dict[str, str]:
    """The caller's environment, with this package importable and no settings of its own."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TROIKA_")}
    root = str(Path(__file__).resolve().parent.parent)
    paths = [root, environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    environment["PYTHONUNBUFFERED"] = "1"
    return environment
