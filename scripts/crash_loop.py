"""Whether processes die again and again: then new requests are better sent away, and told when.

No sockets, no clock. Deaths by a signal from outside do not count: they say nothing about what
comes next.
"""

from collections import deque

from protocol.lifecycle import DeathCause, Health, Role

WINDOW_S = 60.0
DEATHS_IN_WINDOW = 5
"""So many deaths within the window are a crash loop, until everything runs again."""
_MIN_RETRY_S = 1.0
_COUNTED = frozenset(DeathCause) - {DeathCause.KILLED}
_ROLES = (Role.CORE, Role.WORKER)


class CrashLoop:
    """Counts the deaths of core and workers."""

    def __init__(self, give_up_after_s: float | None) -> None:
        """`give_up_after_s`: how long it may last; None: for ever."""
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

    def health(self, now: float, *, is_ready: bool, resume_at: float | None) -> Health:
        """How the engine is, for whoever takes requests.

        Args:
            is_ready: whether core and workers serve.
            resume_at: when the last of them that are dead starts again.
        """
        if is_ready or not self._is_looping(now):
            return Health(False)
        wait_s = 0.0 if resume_at is None else max(0.0, resume_at - now)
        return Health(True, _MIN_RETRY_S + wait_s)

    def _is_looping(self, now: float) -> bool:
        return len(self._deaths) == DEATHS_IN_WINDOW and now - self._deaths[0] <= WINDOW_S
