"""Where the next worker or core comes from, and when helpers are started: standbys and zygote.

Who has died is followed by its standby, which has loaded everything. Where there is none, the
zygote forks a worker; where that is gone too, or it is the core, one is started that loads by
itself. No waiting is without end: what is waited for makes progress, or dies.
"""

from collections.abc import Mapping

from protocol.lifecycle import Role
from scripts.supervisor.supervised import Group, Origin, Process

STANDBY_OF = {Role.WORKER: Role.STANDBY, Role.CORE: Role.STANDBY_CORE}
"""Who is promoted to what; each has rank 0, and stands alone in its role."""
HELPERS = (Role.ZYGOTE, *STANDBY_OF.values())
"""Nothing is served by them: the engine is ready without."""
STANDBY_DELAY_S = 0.5
"""From a start to its standby's: recovering requests need the processors first."""
PATIENCE_S = 2.0
"""The longest wait for a standby that is nearly ready."""
HANDOVER_TIMEOUT_S = 5.0
"""From a request to fork, or to take a place, to the first word of the process."""


class Succession:
    """Decides by looking at the groups; keeps nothing."""

    def __init__(self, groups: Mapping[Role, Group]) -> None:
        """Take all groups of an engine; where there are no helpers every process starts alone."""
        self._groups = groups

    def due_at(self, group: Group) -> float | None:
        """When a group that is gone can be started; None: only after an event."""
        if group.resume_at is None or not group.is_vacant:
            return None
        if group.role in HELPERS:
            return self._helper_due_at(group.role, group.resume_at)
        standby = self.standby_of(group.role)
        if standby is not None and standby.serves:
            return group.resume_at
        zygote = self._zygote()
        if group.role is Role.WORKER and zygote is not None and zygote.is_coming:
            return None  # it began before any other could, or says why it cannot
        is_near = standby is not None and standby.is_coming
        return group.resume_at + PATIENCE_S if is_near else group.resume_at

    def origin(self, role: Role) -> Origin:
        """How the next process of a group comes to be that is due."""
        if role is Role.STANDBY:
            return Origin.FORKED
        standby = self.standby_of(role)
        if standby is not None and standby.serves:
            return Origin.PROMOTED
        zygote = self._zygote()
        is_forked = role is Role.WORKER and zygote is not None and zygote.serves
        return Origin.FORKED if is_forked else Origin.STARTED

    def standby_of(self, role: Role) -> Process | None:
        """Who waits for the death of that role's process; None where nobody does."""
        group = self._groups.get(STANDBY_OF[role]) if role in STANDBY_OF else None
        return None if group is None else group.processes[0]

    def hand_over(self, role: Role, now: float) -> None:
        """The standby takes the place, and its own is free."""
        group = self._groups[STANDBY_OF[role]]
        group.processes[0].vacate()
        group.resume_at = now

    def _zygote(self) -> Process | None:
        group = self._groups.get(Role.ZYGOTE)
        return None if group is None else group.processes[0]

    def _helper_due_at(self, role: Role, resume_at: float) -> float | None:
        """Helpers are for an engine that serves: before, they would take its processors."""
        served_since = self._served_since(role)
        if served_since is None:
            return None
        if role is Role.ZYGOTE:
            return resume_at
        zygote = self._zygote()
        if role is Role.STANDBY and (zygote is None or not zygote.serves):
            return None
        return max(resume_at, served_since + STANDBY_DELAY_S)

    def _served_since(self, role: Role) -> float | None:
        """Since when those serve that a helper must not disturb; None: they do not."""
        roles = (Role.WORKER, Role.CORE) if role is Role.STANDBY_CORE else (Role.WORKER,)
        groups = [self._groups[served] for served in roles]
        times = [group.ready_since for group in groups if group.is_ready]
        known = [time for time in times if time is not None]
        return max(known) if len(known) == len(groups) else None
