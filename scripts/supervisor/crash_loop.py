"""Whether processes die again and again: then new requests are better sent away, and told when.

No sockets, no clock. Deaths by a signal from outside do not count: they say nothing about what
comes next. Nor does time in which somebody was missing: a model that takes a minute to load, and
dies of it each time, is as much of a loop as one that dies at once.
"""

from collections import deque
from collections.abc import Mapping

from protocol.lifecycle import DeathCause, Health, Role
from scripts.supervisor.supervised import Action, Group, Process, Tell

WINDOW_S = 60.0
"""Of time in which core and workers served."""
DEATHS_IN_WINDOW = 5
"""So many deaths within the window are a crash loop, until everything runs again."""
_MIN_RETRY_S = 1.0
_COUNTED = frozenset(DeathCause) - {DeathCause.KILLED}
_ROLES = (Role.CORE, Role.WORKER)


class CrashLoop:
    """Counts the deaths of core and workers."""

    def __init__(self, give_up_after_s: float | None, groups: Mapping[Role, Group]) -> None:
        """Look at the groups of an engine.

        Args:
            give_up_after_s: how long a crash loop may last; None: for ever.
            groups: by role.
        """
        self._groups = groups
        self._told: int | None = None
        """Epoch of an API that believes in a crash loop."""
        self._give_up_after_s = give_up_after_s
        self._deaths: deque[float] = deque(maxlen=DEATHS_IN_WINDOW)
        """Each with the seconds that were served before it."""
        self._served_s = 0.0
        self._last_death = 0.0
        self._failing_since: float | None = None
        """The first death after which there was no quiet time as long as the window."""

    def death(self, role: Role, cause: DeathCause, now: float) -> None:
        """Enter a death, before anything follows from it."""
        if role not in _ROLES:
            return
        self._count_service(now)
        if cause not in _COUNTED:
            return
        if not self._deaths or self._served_s - self._deaths[-1] > WINDOW_S:
            self._failing_since = now
        self._deaths.append(self._served_s)

    def left(self, role: Role, now: float) -> None:
        """Enter that somebody has left as asked: no death, but the end of a time of service."""
        if role in _ROLES:
            self._count_service(now)

    def _count_service(self, now: float) -> None:
        """They served from the last Ready of all to this end, if nobody was missing."""
        began = self._last_death
        self._last_death = now
        for group in self._watched():
            if group.ready_since is None or group.is_failing:
                return
            began = max(began, group.ready_since)
        self._served_s += now - began

    def is_over(self, now: float) -> bool:
        """Whether to give up: it dies and dies, for longer than it may."""
        limit_s, since = self._give_up_after_s, self._failing_since
        if limit_s is None or since is None or not self._is_looping:
            return False
        return now - since >= limit_s

    def health(self, now: float) -> Health:
        """How the engine is, for whoever takes requests."""
        groups = self._watched()
        if not self._is_looping or all(group.is_ready for group in groups):
            return Health(False)
        waits_s = [group.resume_at - now for group in groups if group.resume_at is not None]
        return Health(True, _MIN_RETRY_S + max([0.0, *waits_s]))

    def news(self, now: float) -> list[Action]:
        """Tell the API what it does not know."""
        health, api = self.health(now), self._api
        believes = api is not None and self._told == api.epoch
        return [] if health.is_degraded == believes else self._tell(health)

    def standing(self, now: float) -> list[Action]:
        """Tell the API again while it is so: it believes it for a few seconds only."""
        health = self.health(now)
        return self._tell(health) if health.is_degraded else []

    def _tell(self, health: Health) -> list[Action]:
        api = self._api
        if api is None or not api.is_alive:
            return []
        self._told = api.epoch if health.is_degraded else None
        return [Tell(api.slot, health)]

    @property
    def _api(self) -> Process | None:
        """Whoever takes requests, also while it waits for the engine."""
        return self._groups[Role.API].processes[0] if Role.API in self._groups else None

    def _watched(self) -> list[Group]:
        return [self._groups[role] for role in _ROLES if role in self._groups]

    @property
    def _is_looping(self) -> bool:
        is_full = len(self._deaths) == DEATHS_IN_WINDOW
        return is_full and self._served_s - self._deaths[0] <= WINDOW_S
