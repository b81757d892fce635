"""Counts of observations by upper bound."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from api_proc.peers.shared_counters import Take, private


class Histogram:
    """Counts of observations by upper bound; cheap enough to observe every token."""

    __slots__ = ("_bounds", "_numbers", "name", "text")

    def __init__(
        self, name: str, text: str, bounds: tuple[float, ...], take: Take = private
    ) -> None:
        self.name = name
        self.text = text
        self._bounds = bounds
        self._numbers = take(len(bounds) + 2)  # the counts, then the sum

    @property
    def sum(self) -> float:
        return self._numbers[-1]

    def observe(self, value: float) -> None:
        numbers = self._numbers
        numbers[bisect_left(self._bounds, value)] += 1
        numbers[-1] += value

    def add(self, counts: Sequence[float], total: float) -> None:
        """Add the counts of another histogram with these bounds."""
        for i, number in enumerate(counts):
            self._numbers[i] += number
        self._numbers[-1] += total

    def add_all(self, other: "Histogram") -> None:
        self.add(other._numbers[:-1], other._numbers[-1])

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as Prometheus expects them."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(self._numbers[:-1]), strict=True))
