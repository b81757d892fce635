"""What the core is told of other processes: who is suspected to hang, and what workers died of."""

from collections import deque

from protocol.lifecycle import (
    MAX_SUSPICION_S,
    DeathCause,
    ProcessState,
    Role,
    Suspect,
    WorkerDied,
)
from scripts.supervisor.supervised import Action, Group, LeaveWord, Process, Slot, Tell

_MAX_DEATHS = 16
_TOLD_S = 5.0
"""How long a death is told, again and again."""


class Testimony:
    """Keeps the latest deaths: the core may not have heard of them, or be dead itself."""

    def __init__(self, cores: Group | None) -> None:
        self._cores = [] if cores is None else cores.processes
        self._deaths: deque[tuple[float, WorkerDied]] = deque(maxlen=_MAX_DEATHS)
        """Each with when it is told no more."""

    def suspicion(self, process: Process, for_s: float) -> list[Action]:
        """A worker that may hang gets no more work for so long; 0: it goes on.

        One that starts has none anyway.
        """
        slot = process.slot
        if slot.role is not Role.WORKER or process.state is ProcessState.STARTING:
            return []
        bounded_s = min(max(0.0, for_s), MAX_SUSPICION_S)
        message = Suspect(slot.role, slot.rank, process.epoch, bounded_s)
        return [Tell(core, message) for core in self._listening()]

    def death(
        self, process: Process, cause: DeathCause, step_id: int | None, now: float
    ) -> list[Action]:
        """Say what somebody died of: to the successor, and of a worker to the core."""
        slot, epoch = process.slot, process.epoch
        actions: list[Action] = [LeaveWord(slot, epoch, cause, step_id)]
        if slot.role is Role.WORKER:
            self._deaths.append((now + _TOLD_S, WorkerDied(slot.rank, epoch, cause, step_id)))
        return actions + self.pending(now)

    def pending(self, now: float) -> list[Action]:
        """Deaths that the core may not have heard of."""
        while self._deaths and self._deaths[0][0] < now:
            self._deaths.popleft()
        return [Tell(core, death) for _, death in self._deaths for core in self._listening()]

    def _listening(self) -> list[Slot]:
        """Cores that have said Ready: one or none."""
        states = (ProcessState.READY, ProcessState.DRAINING)
        return [core.slot for core in self._cores if core.is_alive and core.state in states]
