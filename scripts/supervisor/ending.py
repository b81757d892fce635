"""How an engine ends: it finishes what was accepted, then stops everybody, then kills who stays.

No sockets, no clock. It begins with a signal, with a start that is given up, or when nobody waits
for results any more; from then on it only goes forward.
"""

import enum
import logging
from collections.abc import Mapping

from protocol.config import RecoveryConfig
from protocol.lifecycle import Drain, ProcessState, Role, Stop
from scripts.supervisor.succession import HELPERS
from scripts.supervisor.supervised import Action, Exit, Group, Note, Process

STOP_GRACE_S = 5.0
"""From Stop to SIGKILL, for all processes together."""
_STOP_ORDER = (Role.API, Role.CORE, Role.WORKER, *HELPERS)
_DRAIN_ORDER = (Role.API, Role.CORE)
_MAX_FAILURES = 3
"""In a row, of itself: a front that fails more often is not waited for."""


class _Phase(enum.Enum):
    RUNNING = enum.auto()
    DRAINING = enum.auto()
    STOPPING = enum.auto()


class Ending:
    """Draining, stopping, and the exit status. Every method returns what is to be done."""

    def __init__(self, groups: Mapping[Role, Group], recovery: RecoveryConfig) -> None:
        """Take all groups of an engine that runs."""
        self._groups = groups
        self._timeout_s = recovery.shutdown_timeout_s
        self._phase = _Phase.RUNNING
        self._fronts = [role for role in _DRAIN_ORDER if role in groups]
        """Who still has to finish, outermost first."""
        self._is_front_drained = False
        self._were_ready: set[Role] = set()
        self._stages = [role for role in _STOP_ORDER if role in groups]
        self._told: set[Role] = set()
        self._exit_status = 0
        self.deadline: float | None = None
        """Of draining or stopping."""

    @property
    def has_begun(self) -> bool:
        """Whether the engine is to end."""
        return self._phase is not _Phase.RUNNING

    @property
    def is_stopping(self) -> bool:
        """Whether nobody who dies is replaced any more."""
        return self._phase is _Phase.STOPPING

    def is_front(self, role: Role) -> bool:
        """Whether that role is finishing what it has accepted."""
        return self._phase is _Phase.DRAINING and self._fronts[0] is role

    def comes_back(self, role: Role) -> bool:
        """Whether it is needed although it dies: clients of the core have ledgers, and return."""
        is_needed = role is Role.CORE and self._has_served and self.is_front(role)
        return is_needed and self._groups[role].num_failures <= _MAX_FAILURES

    @property
    def _has_served(self) -> bool:
        """Whether there may be requests: none is accepted before there are workers."""
        return self._were_ready >= {Role.CORE, Role.WORKER}

    def on_signal(self, now: float) -> list[Action]:
        """Asked to end: drain first; asked again: end at once."""
        if self._phase is _Phase.RUNNING:
            self._phase = _Phase.DRAINING
            self.deadline = now + self._timeout_s
            text = "finishing what runs; another signal stops at once"
            return [Note(logging.INFO, text), *self._drain_next(now)]
        if self._phase is _Phase.DRAINING:
            self._exit_status = 1
        return self.kill_all(now)

    def kill_all(self, now: float) -> list[Action]:
        """Nobody waits for results any more."""
        return [*([] if self.is_stopping else self.stop(now)), *self._kills()]

    def give_up(self, now: float) -> list[Action]:
        """End with a status other than 0."""
        self._exit_status = 1
        return self.stop(now)

    def tick(self, now: float) -> list[Action]:
        """Go on where waiting has taken too long."""
        if self.deadline is None or now < self.deadline:
            return []
        if self._phase is _Phase.DRAINING:
            text = f"not finished after {self._timeout_s:g} s"
            return [Note(logging.WARNING, text), *self.stop(now)]
        kills = self._kills()
        if kills:
            self.deadline = now + STOP_GRACE_S
            return [Note(logging.WARNING, "processes that do not stop are killed"), *kills]
        self.deadline = None
        return [Note(logging.ERROR, "processes survived SIGKILL"), Exit(1)]

    def pardon(self, stood_s: float) -> None:
        """So long nobody looked."""
        if self.deadline is not None:
            self.deadline += stood_s

    # Draining -----------------------------------------------------------------------------------

    def on_drained(self, role: Role, now: float) -> list[Action]:
        """Who finishes has finished. Only the front is asked to; others end by themselves."""
        if not self.is_front(role):
            return []
        front = self._groups[role].processes[0]
        if front.state is ProcessState.STARTING:  # it listens, and needs not be killed
            front.state = ProcessState.DRAINING
        self._is_front_drained = True
        return self.advance_drain(now)

    def on_ready(self, role: Role, now: float) -> list[Action]:
        """A front that came back is to finish what its clients bring."""
        self._were_ready.add(role)
        return self._drain_next(now) if self.comes_back(role) else []

    def advance_drain(self, now: float) -> list[Action]:
        """The next front, if nobody of this one has anything to finish."""
        if not self._is_front_drained or self._groups[self._fronts[0]].spare is not None:
            return []
        self._is_front_drained = False
        self._fronts.pop(0)
        return self._drain_next(now)

    def _drain_next(self, now: float) -> list[Action]:
        """Outermost first: what the API has accepted still needs the core."""
        if not self._fronts or self._timeout_s == 0:
            return self.stop(now)
        group = self._groups[self._fronts[0]]
        front = group.processes[0]
        if front.state is ProcessState.READY:
            front.state = ProcessState.DRAINING
            return front.ask(Drain())
        is_api = front.slot.role is Role.API
        if is_api and front.state is ProcessState.STARTING and self._has_served:
            return front.ask(Drain())  # it is ready when the engine is, and accepts before
        if (group.is_leaving and front.is_alive) or self.comes_back(front.slot.role):
            return []  # it finishes already, and ends by itself; or it will
        self._is_front_drained = True  # it has nothing; at most its predecessor, which leaves
        return self.advance_drain(now)

    # Stopping -----------------------------------------------------------------------------------

    def stop(self, now: float) -> list[Action]:
        """Nobody is started any more; one role after the other is told to end."""
        self._phase = _Phase.STOPPING
        self.deadline = now + STOP_GRACE_S
        for group in self._groups.values():
            group.resume_at = None
            for process in group.members:
                process.deadline = None
                process.state = process.state if process.is_alive else ProcessState.STOPPED
        return self.advance_stop()

    def advance_stop(self) -> list[Action]:
        """The next role, if all processes of this one are dead; the end after the last."""
        while self._stages and self._groups[self._stages[0]].is_gone:
            self._stages.pop(0)
        if not self._stages:
            self.deadline = None
            return [Exit(self._exit_status)]
        role = self._stages[0]
        if role in self._told:
            return []
        self._told.add(role)
        return [action for process in self._groups[role].members for action in _stop(process)]

    def _kills(self) -> list[Action]:
        return [action for group in self._groups.values() for action in group.kill()]


def _stop(process: Process) -> list[Action]:
    """Whoever is still starting does not listen yet, and helpers have nothing to lose."""
    if not process.is_alive:
        return []
    if process.state is ProcessState.STARTING or process.slot.role in HELPERS:
        return process.kill()
    return process.ask(Stop())
