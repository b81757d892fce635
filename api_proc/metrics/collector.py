"""Exposes all metrics to Prometheus, in a registry that no other library uses.

With several API processes, counters are sums over all of them (`api_proc.peers.shared_counters`),
and gauges are sums over those that answer.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from api_proc.metrics.engine_metrics import ENGINE_COUNTERS, ENGINE_GAUGES, ENGINE_HISTOGRAMS
from api_proc.metrics.histogram import Histogram
from api_proc.metrics.names import metric_name
from api_proc.metrics.process_metrics import API_COUNTERS, REASONS, Metrics
from protocol.api_core import EngineStats
from protocol.config import EngineConfig
from protocol.model_facts import ModelFacts

_Family = type[GaugeMetricFamily] | type[CounterMetricFamily]

_INFO_LABELS = (
    *("dtype", "quantization", "kv_cache_dtype", "device", "decoder", "exact_resume"),
    *("max_model_len", "block_size", "num_gpu_blocks", "num_host_blocks"),
)
"""Facts that the worker has reported about its model: the labels of a gauge."""
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
"""Name, help text."""


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
        for name, text in API_COUNTERS:
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
        for name, text, bounds, counts_field, sum_field in ENGINE_HISTOGRAMS:
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
        for reason in REASONS:
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
