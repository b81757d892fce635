"""Decides how the next worker or core is started, and when standbys and zygotes are.

A dead process is replaced by its standby, which has loaded everything. Without a standby the zygote
forks a worker. Without a zygote, and for the core, a process is started that loads everything
itself. A group of ranks is replaced by a standby group of as many, or forked if the zygotes of all
ranks are ready. Every wait ends: the process waited for makes progress, or its deadline kills it.
"""

from protocol.lifecycle import Role
from scripts.supervisor.actions import Origin
from scripts.supervisor.process_state import Group, Groups, latest

STANDBY_OF = {Role.WORKER: Role.STANDBY, Role.CORE: Role.STANDBY_CORE}
"""The role of the standby for each role; it has as many processes."""
HELPERS = (Role.ZYGOTE, *STANDBY_OF.values())
"""Roles of processes that replace others, in the order in which they are stopped."""
UNNEEDED = (*HELPERS, Role.PLACER, Role.BLOCK_SERVER)
"""Roles that serve no requests: the engine is ready without them."""
STANDBY_DELAY_S = 0.25
"""Time from Ready to the start of the standby: recovering requests need the processors first."""
PATIENCE_S = 2.0
"""Longest wait in seconds for a standby that is starting."""
HANDOVER_TIMEOUT_S = 5.0
"""Longest wait for the first message of a process that was requested from a zygote or promoted."""


class Failover:
    """Decides from the groups alone. Without helpers every process is started by command."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def due_at(self, group: Group) -> float | None:
        """Return when a group without processes can be started; None: only after an event."""
        if group.resume_at is None or not group.is_vacant:
            return None
        if group.role in HELPERS:
            return self._helper_due_at(group.role, group.resume_at)
        standby = self.standby_of(group.role)
        if standby is not None and standby.serves:
            return group.resume_at
        if group.role is Role.WORKER and self._zygotes_are_coming:
            return None  # they began to load before other processes could
        is_near = standby is not None and standby.is_coming
        return group.resume_at + PATIENCE_S if is_near else group.resume_at

    def origin(self, role: Role) -> Origin:
        """Return how the next process of a role would be started now."""
        standby = self.standby_of(role)
        if standby is not None and standby.serves:
            return Origin.PROMOTED
        is_worker = role in (Role.WORKER, Role.STANDBY)
        return Origin.FORKED if is_worker and self._zygotes_serve else Origin.STARTED

    def loads_anew(self) -> bool:
        """Return whether the next workers must load the model: no process holds it for them."""
        standby = self._helper(Role.STANDBY)
        has_standby = standby is not None and (standby.serves or standby.is_coming)
        return not has_standby and not self._zygotes_serve and not self._zygotes_are_coming

    def standby_of(self, role: Role) -> Group | None:
        """Return the standby for a role; None: there is none."""
        return self._helper(STANDBY_OF[role]) if role in STANDBY_OF else None

    def hand_over(self, role: Role, now: float) -> None:
        """Free the standby's slots: its processes were promoted."""
        self._groups[STANDBY_OF[role]].vacate(now)

    @property
    def _zygotes_serve(self) -> bool:
        """Whether there are zygotes, of which each rank has one, and all can fork."""
        zygotes = self._groups.of(Role.ZYGOTE)
        return bool(zygotes) and all(zygote.serves for zygote in zygotes)

    @property
    def _zygotes_are_coming(self) -> bool:
        """Whether zygotes are loading, and none is missing."""
        zygotes = self._groups.of(Role.ZYGOTE)
        is_none_missing = all(zygote.serves or zygote.is_coming for zygote in zygotes)
        return bool(zygotes) and is_none_missing and not self._zygotes_serve

    def _helper(self, role: Role) -> Group | None:
        return next(iter(self._groups.of(role)), None)

    def _helper_due_at(self, role: Role, resume_at: float) -> float | None:
        """Return when a helper can be started: once the engine serves and recovery needs less."""
        served_since = self._served_since(role)
        if served_since is None:
            return None
        if role is Role.ZYGOTE:
            return resume_at
        if role is Role.STANDBY and Role.ZYGOTE in self._groups and not self._zygotes_serve:
            return None
        return max(resume_at, served_since + STANDBY_DELAY_S)

    def _served_since(self, role: Role) -> float | None:
        """Return since when the processes serve that a helper must not disturb, or None."""
        roles = (Role.WORKER, Role.CORE) if role is Role.STANDBY_CORE else (Role.WORKER,)
        groups = [self._groups[served] for served in roles]
        return latest(group.ready_since if group.is_ready else None for group in groups)
