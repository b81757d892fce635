"""A Ray actor on each machine: it starts a host agent there, and watches it.

The agent is not a child of the actor's process. So it serves on when this ends, as when Ray is
lost; an actor that Ray starts again on the same machine finds it by the lock on its run directory.
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
"""In the run directory: a file with the agent's pid, once it was asked to end."""
_DETACH = '"$@" </dev/null >&2 & echo $!'
"""Of a shell: starts a command that outlives it, and prints its pid."""


class Machine:
    """One host agent. Ray makes an actor of this class."""

    def __init__(self, name: str, arguments: Sequence[str]) -> None:
        """`arguments`: of `scripts.agent`, but for those that depend on the machine."""
        self._run_dir = run_dir_of(name, ray.get_runtime_context().get_node_id())
        self._arguments = [*arguments, "--name", name, "--run-dir", str(self._run_dir)]
        self._pidfd: int | None = None
        self._pid = 0

    def keep(self) -> bool:
        """Have the agent run; returns whether it was started now."""
        if self._is_running:
            return False
        self._start()
        return True

    def end(self) -> bool:
        """Have the agent end in order, as its requests continue elsewhere; whether it has ended."""
        if not self._is_running:
            return True
        if self._pidfd is not None and not self._is_asked:
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
            (self._run_dir / _ASKED).write_text(str(self._pid))
        return False

    @property
    def _is_asked(self) -> bool:
        """Whether the agent was asked to end, also by an earlier actor.

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
        """Whether the agent runs: that of this actor, or of an earlier one here."""
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
