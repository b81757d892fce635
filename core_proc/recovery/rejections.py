"""Rejected requests, by their fingerprints: the same request is refused for a while."""

from collections.abc import Iterable

REFUSED_FOR_S = 600.0
MAX_REFUSED = 1024
"""Fingerprints that are remembered; the oldest is forgotten first."""


class Rejections:
    """The fingerprints that are refused now."""

    def __init__(self) -> None:
        self._refused_until: dict[int, float] = {}
        """By fingerprint, in monotonic seconds. The first to end is in front."""
        self.num_rejected = 0
        """Number of rejections since the start."""

    def __len__(self) -> int:
        return len(self._refused_until)

    def add(self, fingerprint: int, now: float) -> None:
        """Refuse a fingerprint from now on."""
        self.num_rejected += 1
        self._refused_until.pop(fingerprint, None)
        self._refused_until[fingerprint] = now + REFUSED_FOR_S
        if len(self._refused_until) > MAX_REFUSED:
            del self._refused_until[next(iter(self._refused_until))]

    def withdraw(self, fingerprints: Iterable[int]) -> None:
        """Refuse these no longer: they were innocent."""
        for fingerprint in fingerprints:
            self._refused_until.pop(fingerprint, None)

    def expire(self, now: float) -> None:
        """Forget the rejections whose time has passed."""
        while self._refused_until and next(iter(self._refused_until.values())) <= now:
            del self._refused_until[next(iter(self._refused_until))]

    def __contains__(self, fingerprint: int) -> bool:
        return fingerprint in self._refused_until
