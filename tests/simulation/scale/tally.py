"""What a simulation of many replicas is asked for: hits, times, balance, and the router's work."""

from collections.abc import Sequence
from statistics import mean, quantiles
from typing import NamedTuple

from core_proc.request import Request
from tests.simulation.scale.replica import Asked, SimulatedReplica

WINDOWS = {"before": (0.2, 0.45), "loss": (0.45, 0.55), "after": (0.7, 0.95)}
"""Parts of the time in which conversations begin; the first fifth fills the caches."""


class Window(NamedTuple):
    """The figures of some requests."""

    num_requests: int
    hit_rate: float
    ttft_ms: tuple[float, float]
    """Median and 99th percentile."""


class Tally:
    """Counts and samples."""

    def __init__(self, num_replicas: int, duration_s: float) -> None:
        self._duration_s = duration_s
        self.num_replicas = num_replicas
        self.num_asked = self.num_answered = self.num_moved = self.num_lost_replicas = 0
        self.num_steps = self.num_tokens = 0
        self.virtual_s = self.busy_share = 0.0
        self.imbalance = 0.0
        """Tokens computed by the busiest replica over the mean, of those that were never lost."""
        self._samples: list[tuple[float, float, int, int, int]] = []
        """Of first tokens: when, after which time, tokens of the prompt, cached and expected."""
        self._num_routed = 0
        self._hash_ns = self._route_ns = 0

    def routed(self, hash_ns: int, route_ns: int) -> None:
        self._num_routed += 1
        self._hash_ns += hash_ns
        self._route_ns += route_ns

    def started(self, now: float, asked: Asked, request: Request) -> None:
        """A request has its first token."""
        num_cached = request.num_cached_tokens or 0
        waited_s = now - asked.sent_at
        num_prompt = request.num_prompt_tokens
        self._samples.append((now, waited_s, num_prompt, num_cached, asked.num_expected))

    def end(self, replicas: Sequence[SimulatedReplica], now: float) -> None:
        self.virtual_s = now
        self.num_steps = sum(replica.num_steps for replica in replicas)
        self.num_tokens = sum(replica.num_computed for replica in replicas)
        self.busy_share = sum(replica.busy_s for replica in replicas) / len(replicas) / now
        lasting = [r.num_computed for r in replicas if r.incarnation == 0]
        self.imbalance = max(lasting) / mean(lasting) if lasting else 1.0

    @property
    def num_lost(self) -> int:
        """Requests without an end."""
        return self.num_asked - self.num_answered

    @property
    def router_us(self) -> tuple[float, float]:
        """The mean time for the hashes of a prompt, and for the choice."""
        return self._hash_ns / self._num_routed / 1000, self._route_ns / self._num_routed / 1000

    @property
    def expectation_error(self) -> tuple[float, float]:
        """Cached tokens that were expected and are missing, and those that were not expected.

        As shares of all prompt tokens.
        """
        total = sum(sample[2] for sample in self._samples)
        missing = sum(max(0, sample[4] - sample[3]) for sample in self._samples)
        more = sum(max(0, sample[3] - sample[4]) for sample in self._samples)
        return missing / total, more / total

    def window(self, name: str) -> Window:
        begin, end = (share * self._duration_s for share in WINDOWS[name])
        samples = [sample for sample in self._samples if begin <= sample[0] < end]
        if len(samples) < 2:
            return Window(len(samples), 0.0, (0.0, 0.0))
        times = quantiles((sample[1] * 1000 for sample in samples), n=100)
        hits = sum(sample[3] for sample in samples) / sum(sample[2] for sample in samples)
        return Window(len(samples), hits, (times[49], times[98]))

    def lines(self) -> list[str]:
        """Render the figures for people."""
        hash_us, route_us = self.router_us
        missing, more = self.expectation_error
        lines = [
            f"{self.num_replicas:,} replicas, {self.num_asked:,} requests, {self.num_lost} lost,"
            f" {self.num_moved:,} moved after the loss of {self.num_lost_replicas:,} replicas",
            f"{self.virtual_s:.0f} s of virtual time, {self.num_steps:,} steps,"
            f" {self.num_tokens:,} tokens computed, replicas busy {self.busy_share:.0%} of it",
            f"busiest replica over the mean: {self.imbalance:.2f}",
            f"router, for a request: {hash_us:.0f} µs for hashes, {route_us:.0f} µs for the choice;"
            f" cached tokens expected and missing {missing:.1%}, not expected {more:.1%}",
        ]
        for name in WINDOWS:
            window = self.window(name)
            median, late = window.ttft_ms
            lines.append(
                f"{name:>6}: {window.num_requests:>9,} first tokens, hit rate"
                f" {window.hit_rate:.1%}, TTFT p50 {median:.0f} ms, p99 {late:.0f} ms"
            )
        return lines
