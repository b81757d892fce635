"""Measured durations of steps: the worker reports each step's time with its results.

Nothing here reads a clock, so the same results lead to the same decisions.
"""

from typing import NamedTuple

_WEIGHT = 0.2
"""Weight of the newest step in a mean."""
_MIN_STEPS = 3
_STALE_AFTER = 1024
"""Steps after which a time counts as unknown, because load and text lengths change."""


class StepTime(NamedTuple):
    """Mean times of one kind of step, in nanoseconds."""

    compute_ns: float
    wait_ns: float
    """Time from the end of the previous step to the arrival of this one at the worker."""


class _Kind:
    """Steps with about the same number of decoding requests."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.last_step = 0
        self.num_requests = self.compute_ns = self.wait_ns = 0.0

    def observe(self, step: int, num_requests: int, compute_ns: int, wait_ns: int) -> None:
        if step - self.last_step > _STALE_AFTER:
            self.num_steps = 0
        self.num_steps += 1
        self.last_step = step
        weight = max(_WEIGHT, 1 / self.num_steps)
        self.num_requests += (num_requests - self.num_requests) * weight
        if self.num_steps > _MIN_STEPS:  # one late step must not count as typical
            compute_ns = min(compute_ns, int(2 * self.compute_ns))
            wait_ns = min(wait_ns, int(2 * self.wait_ns) + 10_000)
        self.compute_ns += (compute_ns - self.compute_ns) * weight
        self.wait_ns += (wait_ns - self.wait_ns) * weight


class DecodeTimes:
    """Times of steps in which each request computes one token, by the number of requests."""

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}
        self._step = 0

    def step(self) -> None:
        """Count a step of any kind, so that times become old."""
        self._step += 1

    def observe(self, num_requests: int, compute_ns: int, wait_ns: int) -> None:
        kind = self._kinds.setdefault(size_class(num_requests), _Kind())
        kind.observe(self._step, num_requests, compute_ns, wait_ns)

    def of(self, num_requests: int) -> StepTime | None:
        """Return the time with this number of requests; None: too few steps have been observed.

        Between two known numbers it is interpolated.
        """
        below = above = None
        for size in sorted(self._kinds):
            kind = self._kinds[size]
            is_old = self._step - kind.last_step > _STALE_AFTER
            if is_old or kind.num_steps < _MIN_STEPS:
                continue
            if size == size_class(num_requests):
                return StepTime(kind.compute_ns, kind.wait_ns)
            if kind.num_requests < num_requests:
                below = kind
            elif above is None:
                above = kind
        if below is None or above is None:
            return None
        share = (num_requests - below.num_requests) / (above.num_requests - below.num_requests)
        return StepTime(
            below.compute_ns + (above.compute_ns - below.compute_ns) * share,
            below.wait_ns + (above.wait_ns - below.wait_ns) * share,
        )


def size_class(number: int) -> int:
    """Round down to three significant bits: numbers of a class differ by at most a quarter."""
    shift = max(0, number.bit_length() - 3)
    return number >> shift << shift
