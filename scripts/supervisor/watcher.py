"""Whose work is overdue, according to their progress pages. No pages here, and no clock.

A process that has not done with its phase when the phase's time is over is suspected, and after
twice that time overdue. Nobody is condemned on one look: a process is killed only if it was
suspected for half of its time at least. A watcher that comes late itself (because it was stopped,
or the machine was) has seen nothing meanwhile, and begins everybody's time anew.
"""

import enum
from collections.abc import Mapping
from typing import NamedTuple

from protocol.progress_page import ProgressRecord
from scripts.supervisor.supervised import Slot

_LEAST_LOOK_S = 0.005
"""Between two looks, whatever the deadlines are."""
_LATENESS = 0.5
"""Of the least time that somebody has; a watcher that comes later than that was away."""


class Judgement(enum.Enum):
    """What a look has changed."""

    SUSPECT = enum.auto()
    CLEARED = enum.auto()
    OVERDUE = enum.auto()


class Verdict(NamedTuple):
    """One process, and what it has shown."""

    slot: Slot
    mark: ProgressRecord
    judgement: Judgement
    age_s: float
    """Since its phase began, or since everybody's time began anew."""


class _Watched:
    """One incarnation, and its last mark."""

    __slots__ = ("is_told", "mark", "since", "suspected_at")

    def __init__(self, mark: ProgressRecord) -> None:
        self.mark = mark
        self.since = mark.began_ns / 1e9
        self.suspected_at: float | None = None
        self.is_told = False
        """It was found overdue."""

    @property
    def due(self) -> float:
        """When something is to be said about it unless it moves on."""
        limit_s = self.mark.limit_s
        if self.suspected_at is None:
            return self.since + limit_s
        return max(self.since + 2 * limit_s, self.suspected_at + limit_s / 2)


class Watcher:
    """Compares marks with the time."""

    def __init__(self, longest_look_s: float) -> None:
        """Ask for a look every `longest_look_s` seconds at least, so that newcomers are seen."""
        self._longest_look_s = longest_look_s
        self._watched: dict[Slot, _Watched] = {}
        self.next_look: float | None = None
        """When to look again at the latest; None: nobody has looked yet."""

    def look(
        self, living: Mapping[Slot, int], marks: Mapping[Slot, ProgressRecord], now: float
    ) -> list[Verdict]:
        """Judge everybody.

        Args:
            living: epochs of the processes to watch.
            marks: what could be read; for whoever is missing the last mark holds.
            now: monotonic time in seconds.
        """
        late_s = 0.0 if self.next_look is None else now - self.next_look
        verdicts = self._take(living, marks, now)
        limits = [watched.mark.limit_s for watched in self._watched.values()]
        if late_s > _LATENESS * min(limits, default=float("inf")):
            verdicts += self._pardon(now)
        for slot, watched in self._watched.items():
            if now >= watched.due and not watched.is_told:
                verdicts.append(self._judge(slot, watched, now))
        due = [watched.due for watched in self._watched.values() if not watched.is_told]
        earliest = min(due, default=float("inf"))
        self.next_look = min(max(earliest, now + _LEAST_LOOK_S), now + self._longest_look_s)
        return verdicts

    def _take(
        self, living: Mapping[Slot, int], marks: Mapping[Slot, ProgressRecord], now: float
    ) -> list[Verdict]:
        """Replace what is no longer so; whoever has moved on is free of suspicion."""
        verdicts = []
        for slot in list(self._watched):
            if living.get(slot) != self._watched[slot].mark.epoch:
                del self._watched[slot]
        for slot, mark in marks.items():
            known = self._watched.get(slot)
            if living.get(slot) != mark.epoch or (known is not None and known.mark == mark):
                continue
            if known is not None and known.suspected_at is not None:
                verdicts.append(Verdict(slot, known.mark, Judgement.CLEARED, now - known.since))
            if mark.deadline_ns == 0:
                self._watched.pop(slot, None)
            else:
                self._watched[slot] = _Watched(mark)
        return verdicts

    def _pardon(self, now: float) -> list[Verdict]:
        verdicts = []
        for slot, watched in self._watched.items():
            if watched.suspected_at is not None and not watched.is_told:
                watched.suspected_at = None
                verdicts.append(Verdict(slot, watched.mark, Judgement.CLEARED, now - watched.since))
            watched.since = now
        return verdicts

    def _judge(self, slot: Slot, watched: _Watched, now: float) -> Verdict:
        if watched.suspected_at is None:
            watched.suspected_at = now
            judgement = Judgement.SUSPECT
        else:
            watched.is_told = True
            judgement = Judgement.OVERDUE
        return Verdict(slot, watched.mark, judgement, now - watched.since)
