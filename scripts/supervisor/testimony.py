"""What the core is told of other processes: who is suspected to hang, and what workers died of."""

from collections import deque

from protocol.lifecycle import DeathCause, ProcessState, Role, Suspect, WorkerDied
from scripts.supervisor.supervised import Action, Group, LeaveWord, Process, Slot, Tell

_MAX_UNTOLD_DEATHS = 16


class Testimony:
    """Keeps what nobody could be told yet: the core may be dead itself."""

    def __init__(self, cores: Group | None) -> None:
        self._cores = [] if cores is None else cores.processes
        self._untold: deque[WorkerDied] = deque(maxlen=_MAX_UNTOLD_DEATHS)

    def suspicion(self, process: Process, is_suspect: bool) -> list[Action]:
        """A worker that may hang gets no more work. One that starts has none anyway."""
        slot = process.slot
        if slot.role is not Role.WORKER or process.state is ProcessState.STARTING:
            return []
        message = Suspect(slot.role, slot.rank, process.epoch, is_suspect)
        return [Tell(core, message) for core in self._listening()]

    def death(self, process: Process, cause: DeathCause, step_id: int | None) -> list[Action]:
        """Say what somebody died of: to the successor, and of a worker to the core."""
        slot, epoch = process.slot, process.epoch
        actions: list[Action] = [LeaveWord(slot, epoch, cause, step_id)]
        if slot.role is Role.WORKER:
            self._untold.append(WorkerDied(slot.rank, epoch, cause, step_id))
        return actions + self.pending()

    def pending(self) -> list[Action]:
        """What can be told now."""
        cores = self._listening()
        if not cores:
            return []
        told: list[Action] = [Tell(core, death) for death in self._untold for core in cores]
        self._untold.clear()
        return told

    def _listening(self) -> list[Slot]:
        """Cores that have said Ready: one or none."""
        states = (ProcessState.READY, ProcessState.DRAINING)
        return [core.slot for core in self._cores if core.is_alive and core.state in states]
