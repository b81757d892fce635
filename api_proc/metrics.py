"""Prometheus metrics: vLLM's names under our prefix, in a registry of their own.

What the core counts comes with its Status messages; what only the API can see is measured here.
"""

from collections.abc import Callable, Iterator

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
    ("worker_restarts", "Workers replaced.", "worker_restarts"),
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
        self, model_name: str, metrics: Metrics, engine_stats: Callable[[], EngineStats]
    ) -> None:
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
        for name, text, histogram in self._metrics.histograms():
            yield self._histogram(name, text, histogram.buckets(), histogram.sum)

    def _engine_families(self, stats: EngineStats) -> Iterator[Metric]:
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
            gauge.add_metric(self._labels, getattr(stats, field))
            yield gauge
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
            counter.add_metric(self._labels, getattr(stats, field))
            yield counter
        counts = stats.loop_seconds_buckets or [0] * (len(LOOP_BUCKETS_S) + 1)
        buckets = cumulative(LOOP_BUCKETS_S, counts)
        text = "Iterations of the core's loop."
        yield self._histogram("core_loop_seconds", text, buckets, stats.loop_seconds_sum)

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
