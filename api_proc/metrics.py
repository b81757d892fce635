"""Prometheus metrics in a separate registry.

Names are `troika:NAME` where vLLM has `vllm:NAME`, else `troika_NAME`, as Prometheus reserves the
colon for recording rules.

The core's counters arrive with its status messages; the rest is measured here. With several API
processes counters are sums over all of them (`api_proc.peers.shared_counters`), and so are gauges,
over those that answer.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from api_proc.peers.shared_counters import Take, private
from protocol.api_core import LOOP_BUCKETS_S, STEP_TOKENS_BUCKETS, EngineStats
from protocol.config import EngineConfig
from protocol.core_worker import ModelFacts
from protocol.sampling import FinishReason

VLLM_NAMES = frozenset(
    (
        *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"),
        *("num_preemptions", "prompt_tokens", "generation_tokens", "request_success"),
        *("prefix_cache_queries", "prefix_cache_hits", "spec_decode_num_drafts"),
        *("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
        *("time_to_first_token_seconds", "inter_token_latency_seconds"),
        *("request_time_per_output_token_seconds", "e2e_request_latency_seconds"),
        *("request_prompt_tokens", "request_generation_tokens"),
        *("request_params_n", "request_params_max_tokens"),
        *("request_queue_time_seconds", "request_prefill_time_seconds"),
        *("request_decode_time_seconds", "request_inference_time_seconds"),
        *("request_prefill_kv_computed_tokens", "request_max_num_generation_tokens"),
        *("iteration_tokens_total", "cache_config_info", "lora_requests_info"),
    )
)
"""Metrics that vLLM has, too; counters without `_total`."""
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
ENGINE_GAUGES = (
    ("num_requests_running", "Requests in the running set.", "num_running_reqs"),
    ("num_requests_waiting", "Requests in the queue.", "num_waiting_reqs"),
    ("num_requests_speculating", "Running requests with drafts.", "num_speculating_reqs"),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", "kv_cache_usage"),
    (
        "state_cache_usage_perc",
        "Share of the blocks for recurrent states in use, 0 to 1.",
        "state_cache_usage",  # None without recurrent layers
    ),
)
ENGINE_COUNTERS = (
    ("num_preemptions", "Requests preempted.", "num_preemptions"),
    ("prompt_tokens", "Prompt tokens of admitted requests.", "prompt_tokens"),
    ("generation_tokens", "Tokens generated.", "generation_tokens"),
    ("prefix_cache_queries", "Tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("prefix_cache_hits", "Tokens found in the prefix cache.", "prefix_cache_hits"),
    ("kv_blocks_stored", "KV blocks written to stores.", "kv_blocks_stored"),
    ("kv_tokens_loaded", "Tokens whose KV was read from stores.", "kv_tokens_loaded"),
    ("states_stored", "Recurrent states written to stores.", "states_stored"),
    ("states_loaded", "Recurrent states read from stores.", "states_loaded"),
    (
        "kv_remote_tokens_loaded",
        "Tokens whose KV was read from other machines, of kv_tokens_loaded.",
        "kv_remote_tokens_loaded",
    ),
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


# What the worker reported about its model, as labels of a gauge.
_INFO_LABELS = (
    *("dtype", "quantization", "kv_cache_dtype", "device", "decoder", "exact_resume"),
    *("max_model_len", "block_size", "num_gpu_blocks", "num_host_blocks"),
)

# Of the core: name, help text, bounds, fields of EngineStats with the counts and the sum.
_ENGINE_HISTOGRAMS = (
    (
        *("core_loop_seconds", "Iterations of the core's loop.", LOOP_BUCKETS_S),
        *("loop_seconds_buckets", "loop_seconds_sum"),
    ),
    (
        *("iteration_tokens_total", "Tokens of a step.", STEP_TOKENS_BUCKETS),
        *("step_tokens_buckets", "step_tokens_sum"),
    ),
)

# Of the API: name and help text.
_API_GAUGES = (
    ("http_requests_open", "HTTP requests being read or answered."),
    ("http_request_bytes", "Bytes of their bodies."),
    ("ledger_requests", "Sequences accepted and not ended."),
    ("stored_responses", "Responses kept for later requests."),
    ("stored_response_bytes", "Bytes of stored responses and their inputs."),
    ("sessions", "Requests whose clients may come back for the rest."),
    ("journal_failed", "Journals that cannot be written at the moment."),
    ("api_servers", "API processes that were to run."),
    ("api_servers_answering", "API processes whose gauges are in the sums."),
)
_API_COUNTERS = (
    ("requests_moved", "Requests that continued at another replica."),
    ("requests_handed_over", "Requests that went from a prefill replica to one that decodes."),
    (
        "requests_resumed_inexactly",
        "Requests that an engine with another fingerprint has continued.",
    ),
    ("requests_resumed", "Requests whose clients have come back."),
    ("journal_bytes", "Bytes handed to the journal."),
    ("journal_failures", "Failures to write the journal."),
)


def metric_name(name: str) -> str:
    """Return the name of a metric as it is exposed."""
    return f"troika:{name}" if name in VLLM_NAMES else f"troika_{name}"


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


class Metrics:
    """The histograms and counters of one API process."""

    def __init__(self, take: Take = private) -> None:
        """Count in the numbers of `take`, which a predecessor may have begun."""
        self.time_to_first_token = Histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S, take
        )
        self.inter_token_latency = Histogram(
            "inter_token_latency_seconds", "Between two outputs.", _PER_TOKEN_S, take
        )
        self.time_per_output_token = Histogram(
            "request_time_per_output_token_seconds",
            "Mean over a request after its first token.",
            _PER_TOKEN_S,
            take,
        )
        self.e2e_request_latency = Histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", _E2E_S, take
        )
        self.prompt_tokens = Histogram(
            "request_prompt_tokens", "Prompt tokens per request.", _TOKENS, take
        )
        self.generation_tokens = Histogram(
            "request_generation_tokens", "Output tokens per request.", _TOKENS, take
        )
        self.params_n = Histogram("request_params_n", "Parameter n.", _SEQUENCES, take)
        self.params_max_tokens = Histogram(
            "request_params_max_tokens", "Parameter max_tokens.", _TOKENS, take
        )
        self._ended = take(len(FinishReason))
        self._slow_readers = take(1)
        self._measured = take(len(_API_COUNTERS))
        self._measured_before = list(self._measured)
        # These follow the numbers that a predecessor of an older version has begun.
        self.queue_time = Histogram(
            "request_queue_time_seconds",
            "Acceptance to first admission to the running set.",
            _E2E_S,
            take,
        )
        self.prefill_time = Histogram(
            "request_prefill_time_seconds", "First admission to first token.", _E2E_S, take
        )
        self.decode_time = Histogram(
            "request_decode_time_seconds", "First token to last token.", _E2E_S, take
        )
        self.inference_time = Histogram(
            "request_inference_time_seconds", "First admission to last token.", _E2E_S, take
        )
        self.prefill_kv_computed_tokens = Histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens per request without those found in the prefix cache.",
            _TOKENS,
            take,
        )
        self.max_num_generation_tokens = Histogram(
            "request_max_num_generation_tokens",
            "Output tokens of the longest of a prompt's sequences.",
            _TOKENS,
            take,
        )

    @property
    def histograms(self) -> list[Histogram]:
        return [value for value in vars(self).values() if isinstance(value, Histogram)]

    @property
    def num_finished(self) -> dict[str, int]:
        """Sequences by finish reason."""
        return {str(reason): int(self._ended[i]) for i, reason in enumerate(FinishReason)}

    def count_end(self, reason: str) -> None:
        self._ended[_REASONS[reason]] += 1

    @property
    def num_slow_readers(self) -> int:
        return int(self._slow_readers[0])

    def count_slow_reader(self) -> None:
        """Count a connection that was closed because its client did not read."""
        self._slow_readers[0] += 1

    def measured(self) -> dict[str, float]:
        return {name: self._measured[i] for i, (name, _) in enumerate(_API_COUNTERS)}

    def take_measured(self, counters: Mapping[str, float]) -> None:
        """Enter counters of other objects, which have counted since this process began."""
        for i, (name, _) in enumerate(_API_COUNTERS):
            self._measured[i] = self._measured_before[i] + counters.get(name, 0)


_REASONS = {str(reason): i for i, reason in enumerate(FinishReason)}


class MetricsCollector(Collector):
    """Exposes the sum of several `Metrics`, gauges, and the core's last statistics."""

    def __init__(
        self,
        model_name: str,
        metrics: Sequence[Metrics],
        engine_stats: Callable[[], Sequence[EngineStats]],
        facts: Callable[[], ModelFacts | None],
        config: EngineConfig,
    ) -> None:
        """`engine_stats` returns those of each replica, which is a label if there are several."""
        self._model_name = model_name
        self._config = config
        self._metrics = metrics
        self._engine_stats = engine_stats
        self._facts = facts
        self._gauges: Mapping[str, float] = {}
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def exposition(self, gauges: Mapping[str, float]) -> bytes:
        self._gauges = gauges
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        gauges, metrics = self._gauges, self._metrics
        yield from self._of_engine(self._engine_stats())
        for name, text in _API_GAUGES:
            yield self._family(GaugeMetricFamily, name, text, gauges.get(name, 0))
        for name, text in _API_COUNTERS:
            total = sum(each.measured()[name] for each in metrics)
            yield self._family(CounterMetricFamily, name, text, total)
        facts = self._facts()
        if facts is not None:
            yield self._info(facts)
            yield self._cache_info(facts)
        yield self._ended()
        text = "Connections dropped because their clients did not read."
        num_slow_readers = sum(each.num_slow_readers for each in metrics)
        yield self._family(CounterMetricFamily, "slow_readers_dropped", text, num_slow_readers)
        for histogram in _sum(metrics):
            name, text = metric_name(histogram.name), histogram.text
            family = HistogramMetricFamily(name, text, labels=["model_name"])
            family.add_metric([self._model_name], histogram.buckets(), histogram.sum)
            yield family

    def _of_engine(self, replicas: Sequence[EngineStats]) -> Iterator[Metric]:
        """Yield what the cores have reported."""
        names = ["model_name"] + ["replica"] * (len(replicas) > 1)
        labels = [[self._model_name, str(number)][: len(names)] for number in range(len(replicas))]
        kinds = ((GaugeMetricFamily, ENGINE_GAUGES), (CounterMetricFamily, ENGINE_COUNTERS))
        for kind, metrics in kinds:
            for name, text, field in metrics:
                family = kind(metric_name(name), text, labels=names)
                for values, stats in zip(labels, replicas, strict=True):
                    if (value := getattr(stats, field)) is not None:
                        family.add_metric(values, value)
                if family.samples:
                    yield family
        for name, text, bounds, counts_field, sum_field in _ENGINE_HISTOGRAMS:
            histogram = HistogramMetricFamily(metric_name(name), text, labels=names)
            for values, stats in zip(labels, replicas, strict=True):
                counts = Histogram("", "", bounds)
                counts.add(getattr(stats, counts_field), getattr(stats, sum_field))
                histogram.add_metric(values, counts.buckets(), counts.sum)
            yield histogram
        if self._config.lora.enable_lora:
            yield self._adapters_in_use(names, labels, replicas)

    def _adapters_in_use(
        self, names: list[str], labels: list[list[str]], replicas: Sequence[EngineStats]
    ) -> Metric:
        text = "Adapters of running and of waiting requests; its value is the time, in seconds."
        fields = ("running_lora_adapters", "waiting_lora_adapters")
        info = GaugeMetricFamily(
            metric_name("lora_requests_info"), text, labels=[*names, "max_lora", *fields]
        )
        max_loras = str(self._config.lora.max_loras)
        for values, stats in zip(labels, replicas, strict=True):
            adapters = [",".join(getattr(stats, field)) for field in fields]
            info.add_metric([*values, max_loras, *adapters], time.time())
        return info

    def _ended(self) -> Metric:
        text = (
            "Sequences that ended, by reason; error: the engine failed. Refused ones do not count."
        )
        labels = ["model_name", "finished_reason"]
        ended = CounterMetricFamily(metric_name("request_success"), text, labels=labels)
        for reason in _REASONS:
            count = sum(each.num_finished[reason] for each in self._metrics)
            ended.add_metric([self._model_name, reason], count)
        return ended

    def _info(self, facts: ModelFacts) -> Metric:
        text = "What the worker reported about its model; always 1."
        info = GaugeMetricFamily(
            metric_name("engine_info"), text, labels=["model_name", *_INFO_LABELS]
        )
        values = [str(getattr(facts, label)) for label in _INFO_LABELS]
        info.add_metric([self._model_name, *values], 1)
        return info

    def _cache_info(self, facts: ModelFacts) -> Metric:
        """Return the settings of the KV cache, with vLLM's names as labels."""
        cache = self._config.cache
        values = {
            "block_size": facts.block_size,
            "cache_dtype": facts.kv_cache_dtype or "auto",
            "enable_prefix_caching": cache.enable_prefix_caching,
            "gpu_memory_utilization": cache.gpu_memory_utilization,
            "num_gpu_blocks": facts.num_gpu_blocks,
            "num_cpu_blocks": facts.num_host_blocks,
        }
        text = "Settings of the KV cache; always 1."
        info = GaugeMetricFamily(
            metric_name("cache_config_info"), text, labels=["model_name", *values]
        )
        info.add_metric([self._model_name, *map(str, values.values())], 1)
        return info

    def _family(self, kind: _Family, name: str, text: str, value: float) -> Metric:
        family = kind(metric_name(name), text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family


def _sum(metrics: Sequence[Metrics]) -> list[Histogram]:
    """Return histograms with the counts of all."""
    total = Metrics()
    for each in metrics:
        for histogram, other in zip(total.histograms, each.histograms, strict=True):
            histogram.add_all(other)
    return total.histograms
