"""The cause of a death, from the exit status and what the supervisor knows of the process."""

import signal
from pathlib import Path
from typing import NamedTuple

from protocol.lifecycle import DeathCause, Fatal
from protocol.process.child_runtime import EXIT_FATAL
from scripts.supervisor.process_state import Process, phase_name

_OWN_SIGNALS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGSYS,
        signal.SIGTRAP,
        signal.SIGXCPU,
        signal.SIGXFSZ,
    }
)
"""Signals that the kernel sends because of what a process does itself."""


class Evidence(NamedTuple):
    """What was found beside the exit status of a dead process."""

    step_id: int | None = None
    """The step that it was computing, according to its progress page."""
    is_oom: bool = False
    """Whether the kernel has killed a process here for lack of memory since the last death."""
    has_completed_step: bool = False
    """Whether it had completed a step, according to its progress page."""


def classify(status: int, fatal: Fatal | None, *, is_overdue: bool, is_oom: bool) -> DeathCause:
    """Name the cause of a death.

    Args:
        status: of the exit; negative for a signal.
        fatal: the last words, if there were any.
        is_overdue: whether the supervisor killed it because it hung.
        is_oom: see `Evidence`.
    """
    if status == -signal.SIGKILL:
        if is_overdue:
            return DeathCause.DEADLINE
        return DeathCause.OOM if is_oom else DeathCause.KILLED
    if -status in _OWN_SIGNALS:
        return DeathCause.SIGNAL
    if status < 0:
        return DeathCause.KILLED
    return DeathCause.EXCEPTION if fatal is not None or status == EXIT_FATAL else DeathCause.ENDED


def describe_death(process: Process, status: int, cause: DeathCause, step_id: int | None) -> str:
    """A line of text about a death."""
    where = "" if step_id is None else f" in step {step_id}"
    if process.fatal is not None:
        phase = phase_name(process.fatal.phase)
        return f"{process.slot} failed ({phase}){where}: {process.fatal.error}"
    if status < 0:
        why = {DeathCause.OOM: ", out of memory", DeathCause.DEADLINE: ": it hung"}.get(cause, "")
        return f"{process.slot} died of {_signal_name(-status)}{where}{why}"
    return f"{process.slot} ended with status {status}{where}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


_KILL_TO_DEATH_S = 10.0
"""From the kernel's count of a kill to the process's end: its memory is freed before."""


class OomCounter:
    """The kernel's count of processes killed for lack of memory in this control group."""

    def __init__(self, root: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc/self")):
        """Begin counting; a counter that cannot be read never grows."""
        self._file = _counter_file(root, proc)
        self._num_seen = 0
        self._num_seen = self._read()
        self._grown_at: float | None = None

    def has_grown(self) -> bool:
        """Whether it has grown since the last call. To be called once for every death."""
        before, self._num_seen = self._num_seen, self._read()
        self._grown_at = None
        return self._num_seen > before

    def expire(self, now: float) -> None:
        """Forget a kill that no death has followed: it was that of another process."""
        if self._read() <= self._num_seen:
            return
        if self._grown_at is None:
            self._grown_at = now
        elif now - self._grown_at > _KILL_TO_DEATH_S:
            self.has_grown()

    def _read(self) -> int:
        if self._file is None:
            return 0
        try:
            lines = self._file.read_text().splitlines()
        except OSError:
            return self._num_seen
        counts = dict(line.split(maxsplit=1) for line in lines if " " in line)
        return int(counts.get("oom_kill", 0))


def _counter_file(root: Path, proc: Path) -> Path | None:
    """The file with this control group's counts, in version 2 or 1."""
    try:
        groups = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            files = [root / path[1:] / "memory.events"]
        elif "memory" in controllers.split(","):
            memory = root / "memory"
            files = [memory / path[1:] / "memory.oom_control", memory / "memory.oom_control"]
        else:
            continue
        for file in files:
            if file.is_file():
                return file
    return None
