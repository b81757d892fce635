"""Prometheus metrics: vLLM's names under our prefix, in a registry of their own.

What the core counts comes with its Status messages; what only the API can see is measured here.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from api_proc.histogram import Histogram, cumulative
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

_GAUGES = (
    ("num_requests_running", "Requests in the running set.", "num_running_reqs"),
    ("num_requests_waiting", "Requests in the queue.", "num_waiting_reqs"),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_cache_usage"),
)
_COUNTERS = (
    ("num_preemptions", "Requests preempted.", "num_preemptions"),
    ("prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", "prefix_cache_hits"),
    ("engine_steps", "Steps dispatched to the worker.", "num_steps"),
    ("fenced_frames", "Frames of an old epoch, dropped.", "fenced_frames"),
    ("quarantined_requests", "Requests found to kill workers.", "num_quarantined"),
    ("spec_decode_num_drafts", "Times that guesses were verified.", "spec_decode_num_drafts"),
    ("spec_decode_num_draft_tokens", "Guessed tokens.", "spec_decode_num_draft_tokens"),
    (
        "spec_decode_num_accepted_tokens",
        "Guessed tokens that were right.",
        "spec_decode_num_accepted_tokens",
    ),
    ("worker_restarts", "Workers replaced.", "worker_restarts"),
)


class Measurements(NamedTuple):
    """What the API holds as of now."""

    num_http_requests: int
    num_http_bytes: int
    num_open_requests: int
    num_sessions: int
    num_resumed: int
    num_journal_bytes: int
    num_journal_failures: int
    is_journal_failed: bool


_HELD_GAUGES = (
    ("http_requests_open", "HTTP requests being read or answered.", "num_http_requests"),
    ("http_request_bytes", "Bytes of their bodies.", "num_http_bytes"),
    ("ledger_requests", "Sequences accepted and not ended.", "num_open_requests"),
    ("sessions", "Requests whose clients may come back for the rest.", "num_sessions"),
    ("journal_failed", "1 while the journal cannot be written.", "is_journal_failed"),
)
_HELD_COUNTERS = (
    ("requests_resumed", "Requests whose clients have come back.", "num_resumed"),
    ("journal_bytes", "Bytes handed to the journal.", "num_journal_bytes"),
    ("journal_failures", "Times that the journal could not be written.", "num_journal_failures"),
)


class Metrics:
    """What the API measures; every observation takes less than a microsecond."""

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
        """Finished sequences by reason."""
        self.num_slow_readers = 0
        """Connections dropped because their clients did not read."""

    def count_end(self, reason: str) -> None:
        """One more sequence has ended."""
        self.num_finished[reason] += 1

    def count_slow_reader(self) -> None:
        """One more was dropped."""
        self.num_slow_readers += 1

    def histograms(self) -> Iterator[tuple[str, str, Histogram]]:
        """Name, help text and values of each histogram."""
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
    """Exposes `Metrics` and the core's last statistics."""

    def __init__(
        self,
        model_name: str,
        metrics: Metrics,
        engine_stats: Callable[[], EngineStats],
        measure: Callable[[], Measurements],
    ) -> None:
        self._measure = measure
        self._labels = [model_name]
        self._metrics = metrics
        self._engine_stats = engine_stats

    def collect(self) -> Iterator[Metric]:
        """All metric families."""
        stats = self._engine_stats()
        yield from self._engine_families(stats)
        finished = CounterMetricFamily(
            PREFIX + "request_success",
            "Sequences that ended, by reason.",
            labels=["model_name", "finished_reason"],
        )
        for reason, count in self._metrics.num_finished.items():
            finished.add_metric([*self._labels, reason], count)
        yield finished
        yield from self._held_families(self._measure())
        text = "Connections dropped because their clients did not read."
        yield self._counter("slow_readers_dropped", text, self._metrics.num_slow_readers)
        for name, text, histogram in self._metrics.histograms():
            yield self._histogram(name, text, histogram.buckets(), histogram.sum)

    def _engine_families(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, field in _GAUGES:
            yield self._gauge(name, text, getattr(stats, field))
        for name, text, field in _COUNTERS:
            yield self._counter(name, text, getattr(stats, field))
        counts = stats.loop_seconds_buckets or [0] * (len(LOOP_BUCKETS_S) + 1)
        buckets = cumulative(LOOP_BUCKETS_S, counts)
        text = "Iterations of the core's loop."
        yield self._histogram("core_loop_seconds", text, buckets, stats.loop_seconds_sum)

    def _held_families(self, held: Measurements) -> Iterator[Metric]:
        for name, text, field in _HELD_GAUGES:
            yield self._gauge(name, text, getattr(held, field))
        for name, text, field in _HELD_COUNTERS:
            yield self._counter(name, text, getattr(held, field))

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family

    def _histogram(
        self, name: str, text: str, buckets: list[tuple[str, float]], total: float
    ) -> Metric:
        family = HistogramMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric(self._labels, buckets, total)
        return family


def make_exposition(collector: Collector) -> Callable[[], bytes]:
    """Return a function that renders the metrics page."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return lambda: generate_latest(registry)
