"""Classifies deaths, and reports deaths and suspected hangs to the core."""

import signal
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from protocol.lifecycle import MAX_SUSPICION_S, DeathCause, ProcessState, Role, Suspect, WorkerDied
from protocol.process.child_runtime import EXIT_FATAL
from scripts.supervisor.actions import Action, RecordDeath, Send, Slot
from scripts.supervisor.process_state import Group, Process, phase_name

_OWN_SIGNALS = frozenset(
    signal.Signals[f"SIG{name}"]
    for name in ("SEGV", "ABRT", "BUS", "ILL", "FPE", "SYS", "TRAP", "XCPU", "XFSZ")
)
"""Signals that the kernel sends because of what a process does itself."""
_MAX_DEATHS = 16
_REPEATED_FOR_S = 5.0


class Evidence(NamedTuple):
    """Observations about a death in addition to the exit status."""

    step_id: int | None = None
    """The step that it was computing, according to its progress page."""
    is_oom: bool = False
    """Whether the kernel has killed a process here for lack of memory since the last death."""
    has_completed_step: bool = False


def classify(process: Process, status: int, *, is_oom: bool) -> DeathCause:
    """Return the cause of a death; `status` is negative for a signal."""
    if status == -signal.SIGKILL:
        if process.is_overdue:
            return DeathCause.DEADLINE
        return DeathCause.OOM if is_oom else DeathCause.KILLED
    if -status in _OWN_SIGNALS:
        return DeathCause.SIGNAL
    if status < 0:
        return DeathCause.KILLED
    is_error = process.fatal is not None or status == EXIT_FATAL
    return DeathCause.EXCEPTION if is_error else DeathCause.ENDED


def describe_death(process: Process, status: int, cause: DeathCause, step_id: int | None) -> str:
    """Return a line of text about a death."""
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


class DeathNotices:
    """Keeps the latest deaths of workers: a notice may be lost, or the core may be dead."""

    def __init__(self, cores: Sequence[Group]) -> None:
        self._cores = [process for group in cores for process in group.processes]
        self._deaths: deque[tuple[float, WorkerDied]] = deque(maxlen=_MAX_DEATHS)
        """The notices, each with the time at which it expires."""

    def suspicion(self, process: Process, for_s: float) -> list[Action]:
        """Keep steps away from a ready worker that may hang, for `for_s` seconds; 0 ends that."""
        slot = process.slot
        if slot.role is not Role.WORKER or process.state is ProcessState.STARTING:
            return []
        message = Suspect(slot.role, slot.rank, process.epoch, min(for_s, MAX_SUSPICION_S))
        return [Send(core, message) for core in self._listening()]

    def death(
        self,
        process: Process,
        cause: DeathCause,
        step_id: int | None,
        now: float,
        *,
        is_loaded_anew: bool,
    ) -> list[Action]:
        """Record a death for the successor; send that of a worker to the core.

        `is_loaded_anew` is true if the successor of a worker must load the model.
        """
        slot, epoch = process.slot, process.epoch
        if slot.role is Role.WORKER:
            notice = WorkerDied(slot.rank, epoch, cause, step_id, is_loaded_anew)
            self._deaths.append((now + _REPEATED_FOR_S, notice))
        return [RecordDeath(slot, epoch, cause, step_id), *self.pending(now)]

    def pending(self, now: float) -> list[Action]:
        """Repeat the notices that have not expired."""
        while self._deaths and self._deaths[0][0] < now:
            self._deaths.popleft()
        return [Send(core, death) for _, death in self._deaths for core in self._listening()]

    def _listening(self) -> list[Slot]:
        """Cores that have sent Ready: one or none."""
        states = (ProcessState.READY, ProcessState.DRAINING)
        return [core.slot for core in self._cores if core.is_alive and core.state in states]
