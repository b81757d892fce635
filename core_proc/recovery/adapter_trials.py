"""Finds the adapter whose load kills workers.

Theory of operation. When a worker dies of a fault of its own (never after a signal from outside),
the adapters that it was loading are suspects. A suspect is loaded alone: no other adapter is loaded
meanwhile and no step is in flight, so a second death proves that the load was the cause. The
adapter is refused then, for a while. One that is loaded, or found to be in error, is cleared. While
the quarantine searches for a request, all adapters are loaded alone, so that the cause of a death
is never in doubt.

Order of calls: `workers_lost` when the workers are gone, `attribute_crash` when the cause of the
death is known, which may be after their successors were adopted.
"""

import logging
from collections.abc import Iterable

REFUSED_FOR_S = 600.0
MAX_REFUSED = 1024
"""Adapters that are remembered; the oldest is forgotten first."""

log = logging.getLogger("troika.core")


class AdapterTrials:
    """The suspects among the adapters, by their ids."""

    def __init__(self) -> None:
        self._suspects: set[int] = set()
        self.on_trial = 0
        """The adapter that is being loaded alone; 0: none."""
        self._lost: tuple[int, ...] = ()
        """What the workers that were lost last were loading."""
        self._lost_on_trial = 0
        self._refused: dict[int, float] = {}
        """Until when. The first to end is in front."""

    def is_suspect(self, adapter_id: int) -> bool:
        """Return whether an adapter must be loaded alone."""
        return adapter_id in self._suspects

    def begin(self, adapter_id: int) -> None:
        """Note that an adapter is being loaded, and nothing else is done."""
        self.on_trial = adapter_id

    def answered(self, adapter_id: int) -> None:
        """Clear an adapter whose load has ended, in whatever way."""
        self._suspects.discard(adapter_id)
        if self.on_trial == adapter_id:
            self.on_trial = 0

    def workers_lost(self, loading: Iterable[int]) -> None:
        """Note the adapters that the lost workers were loading."""
        self._lost, self._lost_on_trial, self.on_trial = tuple(loading), self.on_trial, 0

    def attribute_crash(self, now: float) -> int:
        """Return the adapter whose load has killed the lost workers, or 0 if none is proven."""
        lost, self._lost = self._lost, ()
        culprit, self._lost_on_trial = self._lost_on_trial, 0
        if culprit not in self._suspects:
            self._suspects.update(lost)
            return 0
        log.error("the load of adapter %d has killed its worker alone: it is refused", culprit)
        self._suspects.discard(culprit)
        self._refused.pop(culprit, None)
        self._refused[culprit] = now + REFUSED_FOR_S
        if len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]
        return culprit

    def refuses(self, adapter_id: int, now: float) -> bool:
        """Return whether the load of an adapter has killed workers recently."""
        while self._refused and next(iter(self._refused.values())) <= now:
            del self._refused[next(iter(self._refused))]
        return adapter_id in self._refused
