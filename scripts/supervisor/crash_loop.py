"""Whether processes die again and again: then new requests are better sent away, and told when.

No sockets, no clock. Deaths by a signal from outside do not count: they say nothing about what
comes next.
"""

from collections import deque
from collections.abc import Mapping

from protocol.lifecycle import DeathCause, Health, ProcessState, Role
from scripts.supervisor.supervised import Action, Group, Tell

WINDOW_S = 60.0
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
        self._told: tuple[int, Health] | None = None
        """The API's epoch, and what it believes."""
        self._give_up_after_s = give_up_after_s
        self._deaths: deque[float] = deque(maxlen=DEATHS_IN_WINDOW)
        self._failing_since: float | None = None
        """The first death after which there was no quiet time as long as the window."""

    def death(self, role: Role, cause: DeathCause, now: float) -> None:
        """Enter a death."""
        if role not in _ROLES or cause not in _COUNTED:
            return
        if not self._deaths or now - self._deaths[-1] > WINDOW_S:
            self._failing_since = now
        self._deaths.append(now)

    def is_over(self, now: float) -> bool:
        """Whether to give up: it dies and dies, for longer than it may."""
        limit_s, since = self._give_up_after_s, self._failing_since
        if limit_s is None or since is None or not self._is_looping(now):
            return False
        return now - since >= limit_s

    def health(self, now: float) -> Health:
        """How the engine is, for whoever takes requests."""
        groups = [self._groups[role] for role in _ROLES if role in self._groups]
        if not self._is_looping(now) or all(group.is_ready for group in groups):
            return Health(False)
        waits_s = [group.resume_at - now for group in groups if group.resume_at is not None]
        return Health(True, _MIN_RETRY_S + max([0.0, *waits_s]))

    def news(self, now: float) -> list[Action]:
        """Tell the API what it does not know."""
        apis = self._groups[Role.API].processes if Role.API in self._groups else []
        health = self.health(now)
        actions: list[Action] = []
        for api in apis:
            known = self._told[1] if self._told and self._told[0] == api.epoch else Health(False)
            if api.is_alive and api.state is ProcessState.READY and known != health:
                self._told = (api.epoch, health)
                actions.append(Tell(api.slot, health))
        return actions

    def _is_looping(self, now: float) -> bool:
        return len(self._deaths) == DEATHS_IN_WINDOW and now - self._deaths[0] <= WINDOW_S
