"""The times of a sequence in the metrics: queue, prompt, decoding."""

from types import SimpleNamespace
from typing import cast

import pytest

from api_proc.generation import token_times
from api_proc.generation.token_times import TokenTimes
from api_proc.metrics.histogram import Histogram
from api_proc.metrics.process_metrics import Metrics
from api_proc.text.output_sequence import OutputSequence


def observed(histogram: Histogram) -> tuple[float, float]:
    """Return the number and the sum of the observations."""
    return histogram.buckets()[-1][1], histogram.sum


def metrics_of(
    monkeypatch: pytest.MonkeyPatch, queue_time_s: float | None, accepted_at: float | None
) -> Metrics:
    """Return the metrics of a sequence with tokens at the times 106, 107 and 109."""
    metrics, clock = Metrics(), iter((106.0, 107.0, 109.0, 109.0))
    monkeypatch.setattr(token_times, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    times = TokenTimes(metrics, arrival=100.0)
    for _ in range(3):
        times.arrived()
    sequence = SimpleNamespace(
        finish_reason="length",
        num_output_tokens=3,
        num_prompt_tokens=10,
        num_cached_tokens=4,
        queue_time_s=queue_time_s,
        accepted_at=accepted_at,
    )
    times.ended(cast(OutputSequence, sequence))
    return metrics


def test_queue_prompt_and_decoding_follow_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = metrics_of(monkeypatch, queue_time_s=3.0, accepted_at=101.0)
    assert observed(metrics.queue_time) == (1, 3.0)
    assert observed(metrics.prefill_time) == (1, 106.0 - 104.0)
    assert observed(metrics.decode_time) == (1, 3.0)
    assert observed(metrics.inference_time) == (1, 5.0)
    assert observed(metrics.prefill_kv_computed_tokens) == (1, 6)
    assert observed(metrics.e2e_request_latency) == (1, 9.0)


def test_times_that_another_connection_has_seen_are_not_invented(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that has come back reads tokens that arrived before."""
    metrics = metrics_of(monkeypatch, queue_time_s=3.0, accepted_at=None)
    assert observed(metrics.queue_time) == (1, 3.0)
    for histogram in (metrics.prefill_time, metrics.decode_time, metrics.inference_time):
        assert observed(histogram) == (0, 0.0)


def test_an_unknown_time_in_the_queue_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = metrics_of(monkeypatch, queue_time_s=None, accepted_at=101.0)
    for histogram in (metrics.queue_time, metrics.prefill_time, metrics.inference_time):
        assert observed(histogram) == (0, 0.0)
    assert observed(metrics.e2e_request_latency) == (1, 9.0)
