"""The numbers of the core for `LLM.get_metrics`, in the form of vLLM's."""

from dataclasses import dataclass

from api_proc.metrics.engine_metrics import ENGINE_COUNTERS, ENGINE_GAUGES
from api_proc.metrics.names import metric_name
from protocol.api_core import EngineStats


@dataclass
class Metric:
    """A number by its name in /metrics."""

    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    value: int


@dataclass
class Gauge(Metric):
    value: float


def metrics_of(stats: EngineStats, model_name: str) -> list[Metric]:
    """Return the gauges and counters that /metrics has of the engine, counters without `_total`."""
    labels = {"model_name": model_name}
    found: list[Metric] = []
    for name, _, field in ENGINE_GAUGES:
        if (value := getattr(stats, field)) is not None:
            found.append(Gauge(metric_name(name), labels, value))
    for name, _, field in ENGINE_COUNTERS:
        found.append(Counter(metric_name(name), labels, getattr(stats, field)))
    return found
