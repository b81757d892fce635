"""Arrival times of a sequence's tokens, for the metrics."""

import time

from api_proc.metrics.process_metrics import Metrics
from api_proc.text.output_sequence import OutputSequence


class TokenTimes:
    """The times of one sequence, whose request arrived at `arrival` on the monotonic clock."""

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._first = self._last = 0.0

    @property
    def to_first_s(self) -> float | None:
        """Seconds from the request to its first token; None before that."""
        return self._first - self._arrival if self._first else None

    def arrived(self) -> None:
        """Record that further tokens have arrived."""
        now = time.monotonic()
        if self._first:
            self._metrics.inter_token_latency.observe(now - self._last)
        else:
            self._first = now
            self._metrics.time_to_first_token.observe(now - self._arrival)
        self._last = now

    def ended(self, sequence: OutputSequence) -> None:
        """Record the end of the sequence."""
        metrics = self._metrics
        metrics.count_end(str(sequence.finish_reason))
        metrics.e2e_request_latency.observe(time.monotonic() - self._arrival)
        num_tokens = sequence.num_output_tokens
        metrics.generation_tokens.observe(num_tokens)
        num_computed = sequence.num_prompt_tokens - sequence.num_cached_tokens
        metrics.prefill_kv_computed_tokens.observe(num_computed)
        if num_tokens > 1:
            between_s = (self._last - self._first) / (num_tokens - 1)
            metrics.time_per_output_token.observe(between_s)
        if sequence.queue_time_s is not None:
            metrics.queue_time.observe(sequence.queue_time_s)
            if sequence.accepted_at is not None and self._first:
                self._computed(sequence.accepted_at + sequence.queue_time_s)

    def _computed(self, began: float) -> None:
        """Record the times of a sequence with which the engine began at `began`."""
        decode_s = self._last - self._first
        prefill_s = max(0.0, self._first - began)
        self._metrics.prefill_time.observe(prefill_s)
        self._metrics.decode_time.observe(decode_s)
        self._metrics.inference_time.observe(prefill_s + decode_s)
