"""Limits the deaths of workers in loads of adapters, and refuses an adapter that has killed them.

Theory of operation. An adapter has points. A worker that dies during its load adds two if it died
of a fault of its own, and one if it died of anything else, such as a signal from outside. A load
that ends, with the adapter or with an error, clears the points.

    0, 1    it is loaded like any other
    2, 3    a suspect is loaded alone: no other adapter is loaded meanwhile and no step is in
            flight, so that its load is the only thing that can have killed the workers
    4       it is refused, until an operator loads it again, which makes it a suspect

An adapter is refused only after a worker has died while it loaded this adapter alone. So its loads
kill at most four workers in a row, two if they die of faults, and at most two more each time an
operator loads it again. While the quarantine searches for a request, all adapters are loaded alone,
so that the cause of a death is never in doubt.

A core may die, too. Its link writes the records of `take_records` to the progress page before it
sends a load, and the next core passes them to `inherit`. They contain the points and the unfinished
loads, so a death whose cause the first core did not learn counts in the second one.

Order of calls: `workers_lost` when the workers are gone, then `attribute_death` when the cause of
the death is known, possibly after the successors were adopted.
"""

import logging
from collections.abc import Iterable

FAULT_POINTS = 2
OTHER_POINTS = 1
SUSPECT_POINTS = 2
REFUSED_POINTS = 4
MAX_KNOWN = 128
"""Adapters with points; those that got theirs first are forgotten first."""
_ID_SHIFT = 8
_STATE_SHIFT = 4
_STATE_MASK = 3
_POINTS_MASK = 7
_LOADING, _ALONE = 1, 2

log = logging.getLogger("troika.core")


class AdapterTrials:
    """The points of adapters, and those that are being loaded, by their ids."""

    def __init__(self) -> None:
        self._points: dict[int, int] = {}
        self._loading: set[int] = set()
        self.on_trial = 0
        """The adapter that is being loaded alone; 0: none."""
        self._lost: set[int] = set()
        """The adapters that the last lost workers were loading, until the cause is known."""
        self._lost_on_trial = 0
        self._has_changed = False

    def is_suspect(self, adapter_id: int) -> bool:
        """Return whether an adapter must be loaded alone."""
        return self._points.get(adapter_id, 0) >= SUSPECT_POINTS

    def refuses(self, adapter_id: int) -> bool:
        """Return whether workers have died of the load of an adapter."""
        return self._points.get(adapter_id, 0) >= REFUSED_POINTS

    def allow(self, adapter_id: int) -> None:
        """Try an adapter that is refused once more."""
        if self.refuses(adapter_id):
            self._give(adapter_id, SUSPECT_POINTS)

    def begin(self, adapter_id: int, *, is_alone: bool) -> None:
        """Note that an adapter is being loaded; `is_alone`: nothing else is done meanwhile."""
        self._loading.add(adapter_id)
        self.on_trial = adapter_id if is_alone else 0
        self._has_changed = True

    def answered(self, adapter_id: int) -> None:
        """Clear an adapter whose load has ended, with or without an error."""
        self._loading.discard(adapter_id)
        self._lost.discard(adapter_id)
        self._points.pop(adapter_id, None)
        if self.on_trial == adapter_id:
            self.on_trial = 0
        self._has_changed = True

    def workers_lost(self) -> None:
        """Note that the workers are gone, with what they were loading."""
        self._has_changed = self._has_changed or bool(self._lost or self._loading)
        self._lost, self._loading = self._loading, set()
        self._lost_on_trial, self.on_trial = self.on_trial, 0

    def attribute_death(self, *, is_fault: bool) -> list[int]:
        """Count the death of the lost workers; returns the adapters that are refused from now on.

        `is_fault`: they died by their own fault, such as SIGSEGV.
        """
        lost, self._lost = self._lost, set()
        alone, self._lost_on_trial = self._lost_on_trial, 0
        for adapter_id in lost:
            points = self._points.get(adapter_id, 0) + (FAULT_POINTS if is_fault else OTHER_POINTS)
            max_points = REFUSED_POINTS if adapter_id == alone else REFUSED_POINTS - 1
            self._give(adapter_id, min(points, max_points))
        refused = [adapter_id for adapter_id in lost if self.refuses(adapter_id)]
        for adapter_id in refused:
            log.error("workers die when they load adapter %d alone: it is refused", adapter_id)
        return refused

    def _give(self, adapter_id: int, points: int) -> None:
        self._points.pop(adapter_id, None)
        self._points[adapter_id] = points
        if len(self._points) > MAX_KNOWN:
            del self._points[next(iter(self._points))]
        self._has_changed = True

    def take_records(self) -> list[int] | None:
        """Return a number for each adapter that a successor needs; None: as before."""
        if not self._has_changed:
            return None
        self._has_changed = False
        loading, alone = self._loading, self.on_trial
        if not loading:
            loading, alone = self._lost, self._lost_on_trial
        records = []
        for adapter_id in self._points.keys() | loading:
            state = _ALONE if adapter_id == alone else _LOADING if adapter_id in loading else 0
            points = self._points.get(adapter_id, 0)
            records.append(adapter_id << _ID_SHIFT | state << _STATE_SHIFT | points)
        return records

    def inherit(self, records: Iterable[int]) -> None:
        """Take over the records of the core before this one."""
        for record in records:
            adapter_id, state = record >> _ID_SHIFT, record >> _STATE_SHIFT & _STATE_MASK
            if points := min(record & _POINTS_MASK, REFUSED_POINTS):
                self._give(adapter_id, points)
            if state:
                self._lost.add(adapter_id)
            if state == _ALONE:
                self._lost_on_trial = adapter_id
        self._has_changed = False
