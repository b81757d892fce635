"""Arrival times of a sequence's tokens, for the metrics."""

import time

from api_proc.metrics import Metrics
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
        self._metrics.count_end(str(sequence.finish_reason))
        self._metrics.e2e_request_latency.observe(time.monotonic() - self._arrival)
        num_tokens = sequence.num_output_tokens
        self._metrics.generation_tokens.observe(num_tokens)
        if num_tokens > 1:
            between_s = (self._last - self._first) / (num_tokens - 1)
            self._metrics.time_per_output_token.observe(between_s)
