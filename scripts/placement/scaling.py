"""Decides the number of engines from the length of the queue, as a pure function."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Demand:
    """Numbers of requests at all engines, and of engines that serve."""

    num_serving: int
    num_running: int
    num_waiting: int


class Scaler:
    """Adds engines while requests wait; removes one if the others would be at most half full.

    Engines that do not serve yet, or cannot be reached, count as without capacity.
    """

    def __init__(
        self,
        num_first: int,
        min_engines: int,
        max_engines: int,
        max_num_seqs: int,
        *,
        grow_after_s: float,
        shrink_after_s: float,
    ) -> None:
        """`max_num_seqs`: maximum number of running requests of one engine."""
        self.num_wanted = num_first
        self._min_engines, self._max_engines = min_engines, max_engines
        self._max_num_seqs = max_num_seqs
        self._grow_after_s, self._shrink_after_s = grow_after_s, shrink_after_s
        self._waiting_since: float | None = None
        self._quiet_since: float | None = None

    def update(self, demand: Demand, now: float) -> int:
        """Return the wanted number of engines."""
        num_requests = demand.num_running + demand.num_waiting
        room_without_one = (min(demand.num_serving, self.num_wanted) - 1) * self._max_num_seqs
        self._waiting_since = _since(self._waiting_since, now, demand.num_waiting > 0)
        self._quiet_since = _since(self._quiet_since, now, 2 * num_requests <= room_without_one)
        are_all_there = demand.num_serving >= self.num_wanted
        if self._has_lasted(self._waiting_since, self._grow_after_s, now) and are_all_there:
            num_lacking = max(1, demand.num_waiting // self._max_num_seqs)
            self._set(self.num_wanted + num_lacking)
        elif self._has_lasted(self._quiet_since, self._shrink_after_s, now):
            self._set(self.num_wanted - 1)
        return self.num_wanted

    @staticmethod
    def _has_lasted(since: float | None, min_s: float, now: float) -> bool:
        return since is not None and now - since >= min_s

    def _set(self, number: int) -> None:
        self.num_wanted = min(max(number, self._min_engines), self._max_engines)
        self._waiting_since = self._quiet_since = None


def _since(before: float | None, now: float, holds: bool) -> float | None:
    """Return since when a condition has held; None if it does not."""
    if not holds:
        return None
    return now if before is None else before
