"""Measures steps, and limits a step's duration by those of recent steps of the same size.

Steps are sorted into classes by their number of tokens; each class is twice as large as the one
before. The limit of a class without any step yet follows from its neighbours, with a margin.
"""

import time
from collections import deque
from typing import NamedTuple

from protocol.config import RecoveryConfig

_HISTORY = 128  # steps of a class that count; their 99th percentile is the second largest
_RECOUNT = 16


class Arrival(NamedTuple):
    """When a step arrived, and whether requests were running then."""

    at_ns: int
    finds_requests: bool
    """If False, there was nothing to compute, and the time before the step does not count as a
    wait."""


class StepClock:
    """Measures steps, each from the end of the one before it if it arrived earlier."""

    def __init__(self) -> None:
        self._ended_ns = time.perf_counter_ns()

    def end(self, arrival: Arrival) -> tuple[int, int]:
        """End a step now; returns how long it took and how long the worker waited for it, in ns."""
        before, self._ended_ns = self._ended_ns, time.perf_counter_ns()
        wait_ns = max(arrival.at_ns - before, 0) if arrival.finds_requests else 0
        return self._ended_ns - max(arrival.at_ns, before), wait_ns


class StepTimer:
    """Derives limits from the steps that were observed; reads no clock."""

    def __init__(self, recovery: RecoveryConfig) -> None:
        self._min_s = recovery.hang_timeout_s
        self._factor = recovery.hang_step_factor
        self._first_s = recovery.first_step_timeout_s
        self._classes: dict[int, _SizeClass] = {}

    def limit_s(self, num_tokens: int) -> float:
        """Return the seconds after which a step of `num_tokens` tokens counts as hanging."""
        size = num_tokens.bit_length()
        known = self._classes.get(size)
        if known is not None:
            return max(self._min_s, self._factor * known.p99_s)
        return max(self._min_s, min(self._first_s, self._factor * self._guess_s(size)))

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """Record a step that has ended."""
        self._classes.setdefault(num_tokens.bit_length(), _SizeClass()).observe(duration_s)

    def _guess_s(self, size: int) -> float:
        """Return the duration of the next larger class, or a smaller one's scaled to this size."""
        larger = min((other for other in self._classes if other > size), default=None)
        if larger is not None:
            return self._classes[larger].p99_s
        if not self._classes:
            return self._first_s
        smaller = max(self._classes)
        return self._classes[smaller].p99_s * 2.0 ** (size - smaller)


class _SizeClass:
    def __init__(self) -> None:
        self._durations: deque[float] = deque(maxlen=_HISTORY)
        self._num_seen = 0
        self.p99_s = 0.0  # 99th percentile, recomputed every few steps; at first the maximum

    def observe(self, duration_s: float) -> None:
        self._durations.append(duration_s)
        self._num_seen += 1
        if self._num_seen % _RECOUNT == 0:
            ordered = sorted(self._durations)
            self.p99_s = ordered[len(ordered) * 99 // 100]
        elif self._num_seen < _RECOUNT:
            self.p99_s = max(self.p99_s, duration_s)
