"""Messages to the core about other processes: suspected hangs, and deaths of workers."""

from collections import deque

from protocol.lifecycle import (
    MAX_SUSPICION_S,
    DeathCause,
    ProcessState,
    Role,
    Suspect,
    WorkerDied,
)
from scripts.supervisor.actions import Action, RecordDeath, Send, Slot
from scripts.supervisor.process_state import Group, Process

_MAX_DEATHS = 16
_REPEATED_FOR_S = 5.0
"""How long the notice of a death is repeated."""


class DeathNotices:
    """Keeps the latest deaths: a notice may be lost, or the core be dead itself."""

    def __init__(self, cores: Group | None) -> None:
        self._cores = [] if cores is None else cores.processes
        self._deaths: deque[tuple[float, WorkerDied]] = deque(maxlen=_MAX_DEATHS)
        """Each with the time at which it expires."""

    def suspicion(self, process: Process, for_s: float) -> list[Action]:
        """Keep work from a worker that may hang, for `for_s` seconds; 0 ends that.

        A worker that is starting gets no work anyway.
        """
        slot = process.slot
        if slot.role is not Role.WORKER or process.state is ProcessState.STARTING:
            return []
        bounded_s = min(max(0.0, for_s), MAX_SUSPICION_S)
        message = Suspect(slot.role, slot.rank, process.epoch, bounded_s)
        return [Send(core, message) for core in self._listening()]

    def death(
        self, process: Process, cause: DeathCause, step_id: int | None, now: float
    ) -> list[Action]:
        """Record a death for the successor; send that of a worker to the core."""
        slot, epoch = process.slot, process.epoch
        actions: list[Action] = [RecordDeath(slot, epoch, cause, step_id)]
        if slot.role is Role.WORKER:
            notice = WorkerDied(slot.rank, epoch, cause, step_id)
            self._deaths.append((now + _REPEATED_FOR_S, notice))
        return actions + self.pending(now)

    def pending(self, now: float) -> list[Action]:
        """Repeat the notices that have not expired."""
        while self._deaths and self._deaths[0][0] < now:
            self._deaths.popleft()
        return [Send(core, death) for _, death in self._deaths for core in self._listening()]

    def _listening(self) -> list[Slot]:
        """Cores that have sent Ready: one or none."""
        states = (ProcessState.READY, ProcessState.DRAINING)
        return [core.slot for core in self._cores if core.is_alive and core.state in states]
