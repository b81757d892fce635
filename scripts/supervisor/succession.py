"""Where the next worker comes from, and when its helpers are started: standby, zygote, or neither.

A worker that has died is followed by the standby, which has loaded everything. Where there is none,
the zygote forks one; where that is gone too, one is started that loads everything by itself.
No waiting is without end: what is waited for makes progress, or dies.
"""

from collections.abc import Mapping

from protocol.lifecycle import Role
from scripts.supervisor.supervised import Group, Origin, Process

HELPERS = (Role.ZYGOTE, Role.STANDBY)
"""Nothing is served by them: the engine is ready without."""
STANDBY_DELAY_S = 0.5
"""From a worker's start to its standby's: recovering requests need the processors first."""
PATIENCE_S = 2.0
"""The longest wait for a standby that is nearly ready."""
HANDOVER_TIMEOUT_S = 5.0
"""From a request to fork, or to be the worker, to the first word of the process."""


class Succession:
    """Decides by looking at the groups; keeps nothing."""

    def __init__(self, groups: Mapping[Role, Group]) -> None:
        """Take all groups of an engine; without a zygote every process is started alone."""
        self._groups = groups

    def due_at(self, group: Group) -> float | None:
        """When a group that is gone can be started; None: only after an event."""
        if group.resume_at is None or not group.is_gone:
            return None
        role = group.role
        if role in HELPERS:
            return self._helper_due_at(role, group.resume_at)
        if role is not Role.WORKER or Role.ZYGOTE not in self._groups:
            return group.resume_at
        return self._worker_due_at(group.resume_at)

    def origin(self, role: Role) -> Origin:
        """How the next process of a group comes to be that is due."""
        if role is Role.STANDBY:
            return Origin.FORKED
        if role is not Role.WORKER or Role.ZYGOTE not in self._groups:
            return Origin.STARTED
        if self._helper(Role.STANDBY).serves:
            return Origin.PROMOTED
        return Origin.FORKED if self._helper(Role.ZYGOTE).serves else Origin.STARTED

    def hand_over(self, now: float) -> None:
        """The standby becomes the worker, and its place is free."""
        group = self._groups[Role.STANDBY]
        (standby,) = group.processes
        standby.vacate()
        group.resume_at = now

    def _helper(self, role: Role) -> Process:
        return self._groups[role].processes[0]

    def _worker_due_at(self, resume_at: float) -> float | None:
        standby, zygote = self._helper(Role.STANDBY), self._helper(Role.ZYGOTE)
        if standby.serves:
            return resume_at
        if zygote.is_coming:
            return None  # it began before any other could, or says why it cannot
        return resume_at + PATIENCE_S if standby.is_coming else resume_at

    def _helper_due_at(self, role: Role, resume_at: float) -> float | None:
        """Helpers are for a worker that serves: before, they would take its processors."""
        worker = self._groups[Role.WORKER]
        if not worker.is_ready or worker.ready_since is None:
            return None
        if role is Role.ZYGOTE:
            return resume_at
        if not self._helper(Role.ZYGOTE).serves:
            return None
        return max(resume_at, worker.ready_since + STANDBY_DELAY_S)
