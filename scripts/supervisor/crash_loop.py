"""Detects crash loops, in which new requests are refused with a time to retry.

No sockets, no clock. Deaths by a signal from outside do not count: they do not predict others. Time
without a core or a worker does not count either: a model that loads for a minute before each death
is in a crash loop like one that dies at once.
"""

from collections import deque

from protocol.lifecycle import DeathCause, Health, Role
from scripts.supervisor.actions import Action, Send
from scripts.supervisor.process_state import Groups

WINDOW_S = 60.0
"""Seconds in which core and workers served."""
DEATHS_IN_WINDOW = 5
"""This many deaths within the window are a crash loop, until all processes are ready again."""
_MIN_RETRY_S = 1.0
_COUNTED = frozenset(DeathCause) - {DeathCause.KILLED}
_ROLES = (Role.CORE, Role.WORKER)


class CrashLoop:
    """Counts the deaths of core and workers."""

    def __init__(self, give_up_after_s: float | None, groups: Groups) -> None:
        """Begin without deaths; `give_up_after_s` limits a crash loop if it is not None."""
        self._groups = groups
        self._watched = [groups[role] for role in _ROLES if role in groups]
        self._degraded: set[int] = set()
        """Epochs of the API processes to which a crash loop was reported last, not its end."""
        self._give_up_after_s = give_up_after_s
        self._deaths: deque[float] = deque(maxlen=DEATHS_IN_WINDOW)
        """For each death the seconds that were served before it."""
        self._served_s = 0.0
        self._last_death = 0.0
        self._failing_since: float | None = None
        """The first death since the last quiet time as long as the window."""

    def death(self, role: Role, cause: DeathCause | None, now: float) -> None:
        """Count a death, before its group changes; without a cause it was planned."""
        if role not in _ROLES:
            return
        self._count_service(now)
        if cause not in _COUNTED:
            return
        if not self._deaths or self._served_s - self._deaths[-1] > WINDOW_S:
            self._failing_since = now
        self._deaths.append(self._served_s)

    def _count_service(self, now: float) -> None:
        """Count the time since the last death or Ready, if core and workers are ready."""
        began = self._last_death
        self._last_death = now
        for group in self._watched:
            if group.ready_since is None or group.is_failing:
                return
            began = max(began, group.ready_since)
        self._served_s += now - began

    def is_over(self, now: float) -> bool:
        """Return whether a crash loop has lasted longer than allowed."""
        limit_s, since = self._give_up_after_s, self._failing_since
        if limit_s is None or since is None or not self._is_looping:
            return False
        return now - since >= limit_s

    def health(self, now: float) -> Health:
        if not self._is_looping or all(group.is_ready for group in self._watched):
            return Health(False)
        starts = [group.resume_at for group in self._watched]
        waits_s = [start - now for start in starts if start is not None]
        return Health(True, _MIN_RETRY_S + max([0.0, *waits_s]))

    def report(self, now: float, *, is_repeat: bool = False) -> list[Action]:
        """Report a change to the API, which accepts requests even while it waits for the engine.

        With `is_repeat`, a crash loop is reported again, since a report is valid only for a few
        seconds.
        """
        health = self.health(now)
        apis = [group.processes[0] for group in self._groups.of(Role.API)]
        known, self._degraded = self._degraded, set()
        actions: list[Action] = []
        for api in apis:
            if not api.is_alive:
                continue
            if health.is_degraded:
                self._degraded.add(api.epoch)
            is_known = health.is_degraded == (api.epoch in known)
            if not is_known or (is_repeat and health.is_degraded):
                actions.append(Send(api.slot, health))
        return actions

    @property
    def _is_looping(self) -> bool:
        is_full = len(self._deaths) == DEATHS_IN_WINDOW
        return is_full and self._served_s - self._deaths[0] <= WINDOW_S
