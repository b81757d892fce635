"""Finds processes that hang, from the phases and deadlines in their progress pages.

Theory of operation. A process writes its current phase and the deadline of that phase. After the
deadline it is suspected; after twice that time it is overdue, and is killed. One look is not enough
to kill a process: it must have been suspected for at least half of its time. If the watcher itself
is late, because it or the machine was stopped, it extends all deadlines.

This module reads no pages and no clock: `look` gets both.
"""

import enum
from collections.abc import Mapping
from typing import NamedTuple

from protocol.process.progress_page import ProgressRecord
from scripts.supervisor.actions import Slot

_MIN_LOOK_S = 0.005
"""Shortest time in seconds between two looks."""
_LATENESS = 0.5
"""Share of the shortest deadline by which a look may be late before deadlines are extended."""


class HangStatus(enum.Enum):
    """The result of a look at a process."""

    SUSPECT = enum.auto()
    CLEARED = enum.auto()
    OVERDUE = enum.auto()


class HangReport(NamedTuple):
    """A change in one process's status."""

    slot: Slot
    mark: ProgressRecord
    status: HangStatus
    age_s: float
    """Seconds since the phase began, or since the deadlines were extended."""


class _Watched:
    """One incarnation, and its last mark."""

    def __init__(self, mark: ProgressRecord) -> None:
        self.mark = mark
        self.since = mark.began_ns / 1e9
        self.suspected_at: float | None = None
        self.is_overdue = False

    @property
    def due(self) -> float:
        """Time at which the status changes unless the process makes progress."""
        limit_s = self.mark.limit_s
        if self.suspected_at is None:
            return self.since + limit_s
        return max(self.since + 2 * limit_s, self.suspected_at + limit_s / 2)

    def report(self, slot: Slot, status: HangStatus, now: float) -> HangReport:
        return HangReport(slot, self.mark, status, now - self.since)


class Watcher:
    """Compares marks with the time."""

    def __init__(self, longest_look_s: float) -> None:
        """Require a look every `longest_look_s` seconds at least, to notice new processes."""
        self._longest_look_s = longest_look_s
        self._watched: dict[Slot, _Watched] = {}
        self.next_look: float | None = None
        """Time by which to look again; None before the first look."""

    def look(
        self, living: Mapping[Slot, int], marks: Mapping[Slot, ProgressRecord], now: float
    ) -> list[HangReport]:
        """Compare all processes with the time; an unreadable mark is taken from the last look."""
        late_s = 0.0 if self.next_look is None else now - self.next_look
        reports = self._update(living, marks, now)
        limits = [watched.mark.limit_s for watched in self._watched.values()]
        if late_s > _LATENESS * min(limits, default=float("inf")):
            reports += self._extend_deadlines(now)
        for slot, watched in self._watched.items():
            if now < watched.due or watched.is_overdue:
                continue
            if watched.suspected_at is None:
                watched.suspected_at = now
                reports.append(watched.report(slot, HangStatus.SUSPECT, now))
            else:
                watched.is_overdue = True
                reports.append(watched.report(slot, HangStatus.OVERDUE, now))
        due = [watched.due for watched in self._watched.values() if not watched.is_overdue]
        earliest = min(due, default=float("inf"))
        self.next_look = min(max(earliest, now + _MIN_LOOK_S), now + self._longest_look_s)
        return reports

    def _update(
        self, living: Mapping[Slot, int], marks: Mapping[Slot, ProgressRecord], now: float
    ) -> list[HangReport]:
        """Replace marks that have changed; a process that made progress is cleared."""
        reports = []
        for slot in list(self._watched):
            if living.get(slot) != self._watched[slot].mark.epoch:
                del self._watched[slot]
        for slot, mark in marks.items():
            known = self._watched.get(slot)
            if living.get(slot) != mark.epoch or (known is not None and known.mark == mark):
                continue
            if known is not None and known.suspected_at is not None:
                reports.append(known.report(slot, HangStatus.CLEARED, now))
            if mark.deadline_ns == 0:
                self._watched.pop(slot, None)
            else:
                self._watched[slot] = _Watched(mark)
        return reports

    def _extend_deadlines(self, now: float) -> list[HangReport]:
        reports = []
        for slot, watched in self._watched.items():
            if watched.suspected_at is not None and not watched.is_overdue:
                watched.suspected_at = None
                reports.append(watched.report(slot, HangStatus.CLEARED, now))
            watched.since = now
        return reports
