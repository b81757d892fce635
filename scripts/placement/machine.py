"""The Ray actor that starts and watches a host agent on its machine.

The agent is not a child of the actor's process, so it continues when that process ends, for example
because Ray is lost. An actor that Ray restarts on the same machine finds the agent by the lock on
its run directory.
"""

import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import ray

from scripts.supervisor.run_dirs import holder_of

_START_TIMEOUT_S = 30.0
_ASKED = "asked-to-end"
"""File in the run directory with the pid of an agent that was asked to end."""
_DETACH = '"$@" </dev/null >&2 & echo $!'
"""Shell script that starts a command, which outlives the shell, and prints its pid."""


class Machine:
    """One host agent. Ray makes an actor of this class."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        """`arguments`: command line of `scripts.agent`, without what depends on the machine."""
        self._run_dir = run_dir_of(name, ray.get_runtime_context().get_node_id())
        self._arguments = [*arguments, "--name", name, "--run-dir", str(self._run_dir)]
        self._pidfd: int | None = None
        self._pid = 0

    def keep(self) -> bool:
        """Start the agent unless it runs; return True if it was started."""
        if self._is_running:
            return False
        self._start()
        return True

    def end(self) -> bool:
        """Ask the agent to end in order, so that its requests move; return True if it has ended."""
        if not self._is_running:
            return True
        if self._pidfd is not None and not self._is_asked:
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            (self._run_dir / _ASKED).write_text(str(self._pid))
        return False

    @property
    def _is_asked(self) -> bool:
        """True if this or an earlier actor has asked the agent to end.

        A second signal would end its engine at once.
        """
        try:
            return (self._run_dir / _ASKED).read_text() == str(self._pid)
        except FileNotFoundError:
            return False

    def _start(self) -> None:
        (self._run_dir / _ASKED).unlink(missing_ok=True)  # a new agent may get an old pid
        command = [sys.executable, "-m", "scripts.agent", *self._arguments]
        environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
        done = subprocess.run(
            ["/bin/sh", "-c", _DETACH, "sh", *command],
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            timeout=_START_TIMEOUT_S,
            check=True,
        )
        self._watch(int(done.stdout))

    @property
    def _is_running(self) -> bool:
        """True if an agent runs that this or an earlier actor on this machine started."""
        if self._pidfd is not None and _has_ended(self._pidfd):
            os.close(self._pidfd)
            self._pidfd = None
        if self._pidfd is None and (pid := holder_of(str(self._run_dir))) is not None:
            self._watch(pid)
        return self._pidfd is not None

    def _watch(self, pid: int) -> None:
        self._pidfd, self._pid = _open(pid), pid


def run_dir_of(name: str, node_id: str) -> Path:
    """Return the run directory of an agent on one machine of a cluster."""
    digest = blake2b(f"{name} {node_id}".encode(), digest_size=6).hexdigest()
    return Path(tempfile.gettempdir()) / f"troika-ray-{os.getuid()}-{digest}"


def _has_ended(pidfd: int) -> bool:
    ready, _, _ = select.select([pidfd], [], [], 0)
    return bool(ready)


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
