"""Prometheus metrics: vLLM's names with Troika's prefix, in a registry of their own.

The core's counters arrive with its status messages; the rest is measured here.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from protocol.api_core import LOOP_BUCKETS_S, EngineStats
from protocol.sampling import FinishReason

PREFIX = "troika:"

_SECONDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_E2E_S = (*_SECONDS, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_PER_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_SEQUENCES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)

# Of the core: name, help text, field of EngineStats.
_ENGINE_GAUGES = (
    ("num_requests_running", "Requests in the running set.", "num_running_reqs"),
    ("num_requests_waiting", "Requests in the queue.", "num_waiting_reqs"),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_cache_usage"),
)
_ENGINE_COUNTERS = (
    ("num_preemptions", "Requests preempted.", "num_preemptions"),
    ("prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", "prefix_cache_hits"),
    ("engine_steps", "Steps dispatched to the worker.", "num_steps"),
    ("fenced_frames", "Frames of an old epoch, dropped.", "fenced_frames"),
    ("quarantined_requests", "Requests found to kill workers.", "num_quarantined"),
    ("spec_decode_num_drafts", "Verifications of drafts.", "spec_decode_num_drafts"),
    ("spec_decode_num_draft_tokens", "Draft tokens.", "spec_decode_num_draft_tokens"),
    (
        "spec_decode_num_accepted_tokens",
        "Accepted draft tokens.",
        "spec_decode_num_accepted_tokens",
    ),
    ("worker_restarts", "Workers replaced.", "worker_restarts"),
)


class Measurements(NamedTuple):
    """The present sizes and totals of the API process."""

    num_http_requests: int
    num_http_bytes: int
    num_open_requests: int
    num_sessions: int
    num_resumed: int
    num_journal_bytes: int
    num_journal_failures: int
    is_journal_failed: bool


_API_GAUGES = (
    ("http_requests_open", "HTTP requests being read or answered.", "num_http_requests"),
    ("http_request_bytes", "Bytes of their bodies.", "num_http_bytes"),
    ("ledger_requests", "Sequences accepted and not ended.", "num_open_requests"),
    ("sessions", "Requests whose clients may come back for the rest.", "num_sessions"),
    ("journal_failed", "1 while the journal cannot be written.", "is_journal_failed"),
)
_API_COUNTERS = (
    ("requests_resumed", "Requests whose clients have come back.", "num_resumed"),
    ("journal_bytes", "Bytes handed to the journal.", "num_journal_bytes"),
    ("journal_failures", "Failures to write the journal.", "num_journal_failures"),
)


class Histogram:
    """Counts of observations by upper bound; cheap enough to observe every token."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as Prometheus expects them."""
        return _cumulative(self._bounds, self._counts)


def _cumulative(bounds: tuple[float, ...], counts: list[int]) -> list[tuple[str, float]]:
    names = [*(f"{bound:g}" for bound in bounds), "+Inf"]
    return list(zip(names, accumulate(counts), strict=True))


class Metrics:
    """The API's histograms and counters."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(_FIRST_TOKEN_S)
        self.inter_token_latency = Histogram(_PER_TOKEN_S)
        self.time_per_output_token = Histogram(_PER_TOKEN_S)
        self.e2e_request_latency = Histogram(_E2E_S)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.params_n = Histogram(_SEQUENCES)
        self.params_max_tokens = Histogram(_TOKENS)
        self.num_finished = dict.fromkeys(map(str, FinishReason), 0)
        """Sequences by finish reason."""
        self.num_slow_readers = 0
        """Connections closed because their clients did not read."""

    def count_end(self, reason: str) -> None:
        self.num_finished[reason] += 1

    def count_slow_reader(self) -> None:
        """Count a connection that was closed because its client did not read."""
        self.num_slow_readers += 1

    def histograms(self) -> Iterator[tuple[str, str, Histogram]]:
        """Yield name, help text and values of each histogram."""
        yield "time_to_first_token_seconds", "Arrival to first token.", self.time_to_first_token
        yield "inter_token_latency_seconds", "Between two outputs.", self.inter_token_latency
        yield (
            "request_time_per_output_token_seconds",
            "Mean over a request after its first token.",
            self.time_per_output_token,
        )
        yield "e2e_request_latency_seconds", "Arrival to last token.", self.e2e_request_latency
        yield "request_prompt_tokens", "Prompt tokens per request.", self.prompt_tokens
        yield "request_generation_tokens", "Output tokens per request.", self.generation_tokens
        yield "request_params_n", "Parameter n.", self.params_n
        yield "request_params_max_tokens", "Parameter max_tokens.", self.params_max_tokens


class MetricsCollector(Collector):
    """Exposes `Metrics`, present measurements and the core's last statistics."""

    def __init__(
        self,
        model_name: str,
        metrics: Metrics,
        engine_stats: Callable[[], EngineStats],
        measure: Callable[[], Measurements],
    ) -> None:
        self._labels = {"model_name": model_name}
        self._metrics = metrics
        self._engine_stats = engine_stats
        self._measure = measure

    def collect(self) -> Iterator[Metric]:
        stats, measured = self._engine_stats(), self._measure()
        rows = ((_ENGINE_GAUGES, _ENGINE_COUNTERS, stats), (_API_GAUGES, _API_COUNTERS, measured))
        for gauges, counters, source in rows:
            for name, text, field in gauges:
                gauge = GaugeMetricFamily(PREFIX + name, text, labels=[*self._labels])
                gauge.add_metric([*self._labels.values()], getattr(source, field))
                yield gauge
            for name, text, field in counters:
                yield self._counter(name, text, {"": getattr(source, field)})
        text = "Sequences that ended, by reason."
        yield self._counter("request_success", text, self._metrics.num_finished, "finished_reason")
        text = "Connections dropped because their clients did not read."
        yield self._counter("slow_readers_dropped", text, {"": self._metrics.num_slow_readers})
        counts = stats.loop_seconds_buckets or [0] * (len(LOOP_BUCKETS_S) + 1)
        buckets = _cumulative(LOOP_BUCKETS_S, counts)
        text = "Iterations of the core's loop."
        yield self._histogram("core_loop_seconds", text, buckets, stats.loop_seconds_sum)
        for name, text, histogram in self._metrics.histograms():
            yield self._histogram(name, text, histogram.buckets(), histogram.sum)

    def _counter(self, name: str, text: str, values: dict[str, int], label: str = "") -> Metric:
        """Return a family with one value, or one for each value of `label`."""
        labels = [*self._labels, label] if label else [*self._labels]
        family = CounterMetricFamily(PREFIX + name, text, labels=labels)
        for key, value in values.items():
            keys = [*self._labels.values(), key] if label else [*self._labels.values()]
            family.add_metric(keys, value)
        return family

    def _histogram(
        self, name: str, text: str, buckets: list[tuple[str, float]], total: float
    ) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=[*self._labels])
        family.add_metric([*self._labels.values()], buckets, total)
        return family


def make_exposition(collector: Collector) -> Callable[[], bytes]:
    """Return a function that renders the metrics page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return lambda: generate_latest(registry)
