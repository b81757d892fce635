"""How many engines there should be, by the length of the queue: a pure function of its inputs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Demand:
    """The requests at all engines, and the engines that serve."""

    num_serving: int
    num_running: int
    num_waiting: int


class Scaler:
    """Grows while requests wait, and shrinks once one engine less would be half full at most.

    Engines that do not serve yet, or cannot be reached, have no room.
    """

    def __init__(
        self,
        num_first: int,
        least: int,
        most: int,
        max_num_seqs: int,
        *,
        grow_after_s: float,
        shrink_after_s: float,
    ) -> None:
        """`max_num_seqs`: requests that run at a time at each engine."""
        self.num_wanted = num_first
        self._least, self._most = least, most
        self._max_num_seqs = max_num_seqs
        self._grow_after_s, self._shrink_after_s = grow_after_s, shrink_after_s
        self._waiting_since: float | None = None
        self._quiet_since: float | None = None

    def update(self, demand: Demand, now: float) -> int:
        """Return the number of engines that are wanted now."""
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
    def _has_lasted(since: float | None, least_s: float, now: float) -> bool:
        return since is not None and now - since >= least_s

    def _set(self, number: int) -> None:
        self.num_wanted = min(max(number, self._least), self._most)
        self._waiting_since = self._quiet_since = None


def _since(before: float | None, now: float, holds: bool) -> float | None:
    """Return since when a condition has held; None if it does not."""
    if not holds:
        return None
    return now if before is None else before
