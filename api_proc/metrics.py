"""Prometheus metrics: vLLM's names with Troika's prefix, in a registry of their own.

The core's counters arrive with its status messages; the rest is measured here.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

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
_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]

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


# Of this process: name and help text.
_API_GAUGES = (
    ("http_requests_open", "HTTP requests being read or answered."),
    ("http_request_bytes", "Bytes of their bodies."),
    ("ledger_requests", "Sequences accepted and not ended."),
    ("sessions", "Requests whose clients may come back for the rest."),
    ("journal_failed", "1 while the journal cannot be written."),
)
_API_COUNTERS = (
    ("requests_resumed", "Requests whose clients have come back."),
    ("journal_bytes", "Bytes handed to the journal."),
    ("journal_failures", "Failures to write the journal."),
)


class Histogram:
    """Counts of observations by upper bound; cheap enough to observe every token."""

    __slots__ = ("_bounds", "counts", "name", "sum", "text")

    def __init__(self, name: str, text: str, bounds: tuple[float, ...]) -> None:
        self.name = name
        self.text = text
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return cumulative counts by upper bound, as Prometheus expects them."""
        names = [*(f"{bound:g}" for bound in self._bounds), "+Inf"]
        return list(zip(names, accumulate(self.counts), strict=True))


class Metrics:
    """The API's histograms and counters."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S
        )
        self.inter_token_latency = Histogram(
            "inter_token_latency_seconds", "Between two outputs.", _PER_TOKEN_S
        )
        self.time_per_output_token = Histogram(
            "request_time_per_output_token_seconds",
            "Mean over a request after its first token.",
            _PER_TOKEN_S,
        )
        self.e2e_request_latency = Histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", _E2E_S
        )
        self.prompt_tokens = Histogram(
            "request_prompt_tokens", "Prompt tokens per request.", _TOKENS
        )
        self.generation_tokens = Histogram(
            "request_generation_tokens", "Output tokens per request.", _TOKENS
        )
        self.params_n = Histogram("request_params_n", "Parameter n.", _SEQUENCES)
        self.params_max_tokens = Histogram(
            "request_params_max_tokens", "Parameter max_tokens.", _TOKENS
        )
        self.num_finished = dict.fromkeys(map(str, FinishReason), 0)
        """Sequences by finish reason."""
        self.num_slow_readers = 0

    def count_end(self, reason: str) -> None:
        self.num_finished[reason] += 1

    def count_slow_reader(self) -> None:
        """Count a connection that was closed because its client did not read."""
        self.num_slow_readers += 1


class MetricsCollector(Collector):
    """Exposes `Metrics`, present measurements by name, and the core's last statistics."""

    def __init__(
        self,
        model_name: str,
        metrics: Metrics,
        engine_stats: Callable[[], EngineStats],
        measure: Callable[[], dict[str, int]],
    ) -> None:
        self._model_name = model_name
        self._metrics = metrics
        self._engine_stats = engine_stats
        self._measure = measure
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        stats, measured, metrics = self._engine_stats(), self._measure(), self._metrics
        for name, text, field in _ENGINE_GAUGES:
            yield self._family(GaugeMetricFamily, name, text, getattr(stats, field))
        for name, text, field in _ENGINE_COUNTERS:
            yield self._family(CounterMetricFamily, name, text, getattr(stats, field))
        for name, text in _API_GAUGES:
            yield self._family(GaugeMetricFamily, name, text, measured.get(name, 0))
        for name, text in _API_COUNTERS:
            yield self._family(CounterMetricFamily, name, text, measured.get(name, 0))
        name, text = PREFIX + "request_success", "Sequences that ended, by reason."
        ended = CounterMetricFamily(name, text, labels=["model_name", "finished_reason"])
        for reason, count in metrics.num_finished.items():
            ended.add_metric([self._model_name, reason], count)
        yield ended
        name, text = (
            "slow_readers_dropped",
            "Connections dropped because their clients did not read.",
        )
        yield self._family(CounterMetricFamily, name, text, metrics.num_slow_readers)
        core_loop = Histogram("core_loop_seconds", "Iterations of the core's loop.", LOOP_BUCKETS_S)
        core_loop.counts = stats.loop_seconds_buckets or core_loop.counts
        core_loop.sum = stats.loop_seconds_sum
        own = (value for value in vars(metrics).values() if isinstance(value, Histogram))
        for histogram in (core_loop, *own):
            name, text = PREFIX + histogram.name, histogram.text
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model_name], histogram.buckets(), histogram.sum)
            yield family

    def _family(self, kind: _Family, name: str, text: str, value: float) -> Metric:
        family = kind(PREFIX + name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
