"""What one API process counts and observes itself."""

from collections.abc import Mapping

from api_proc.metrics.histogram import Histogram
from api_proc.peers.shared_counters import Take, private
from protocol.sampling import FinishReason

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

API_COUNTERS = (
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
"""Name, help text."""
REASONS = {str(reason): i for i, reason in enumerate(FinishReason)}


class Metrics:
    """The histograms and counters of one API process."""

    def __init__(self, take: Take = private) -> None:
        """Count in the numbers of `take`, which a predecessor may have begun.

        The order stays as it is, since the predecessor may be of an older version.
        """

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, bounds, take)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_S
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two outputs.", _PER_TOKEN_S
        )
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds",
            "Mean over a request after its first token.",
            _PER_TOKEN_S,
        )
        self.e2e_request_latency = histogram(
            "e2e_request_latency_seconds", "Arrival to last token.", _E2E_S
        )
        self.prompt_tokens = histogram(
            "request_prompt_tokens", "Prompt tokens per request.", _TOKENS
        )
        self.generation_tokens = histogram(
            "request_generation_tokens", "Output tokens per request.", _TOKENS
        )
        self.params_n = histogram("request_params_n", "Parameter n.", _SEQUENCES)
        self.params_max_tokens = histogram(
            "request_params_max_tokens", "Parameter max_tokens.", _TOKENS
        )
        self._ended = take(len(FinishReason))
        self._slow_readers = take(1)
        self._measured = take(len(API_COUNTERS))
        self._measured_before = list(self._measured)
        self.queue_time = histogram(
            "request_queue_time_seconds",
            "Acceptance to first admission to the running set.",
            _E2E_S,
        )
        self.prefill_time = histogram(
            "request_prefill_time_seconds", "First admission to first token.", _E2E_S
        )
        self.decode_time = histogram(
            "request_decode_time_seconds", "First token to last token.", _E2E_S
        )
        self.inference_time = histogram(
            "request_inference_time_seconds", "First admission to last token.", _E2E_S
        )
        self.prefill_kv_computed_tokens = histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens per request without those found in the prefix cache.",
            _TOKENS,
        )
        self.max_num_generation_tokens = histogram(
            "request_max_num_generation_tokens",
            "Output tokens of the longest of a prompt's sequences.",
            _TOKENS,
        )

    @property
    def histograms(self) -> list[Histogram]:
        return [value for value in vars(self).values() if isinstance(value, Histogram)]

    @property
    def num_finished(self) -> dict[str, int]:
        """Sequences by finish reason."""
        return {str(reason): int(self._ended[i]) for i, reason in enumerate(FinishReason)}

    def count_end(self, reason: str) -> None:
        self._ended[REASONS[reason]] += 1

    @property
    def num_slow_readers(self) -> int:
        return int(self._slow_readers[0])

    def count_slow_reader(self) -> None:
        """Count a connection that was closed because its client did not read."""
        self._slow_readers[0] += 1

    def measured(self) -> dict[str, float]:
        return {name: self._measured[i] for i, (name, _) in enumerate(API_COUNTERS)}

    def take_measured(self, counters: Mapping[str, float]) -> None:
        """Enter counters of other objects, which have counted since this process began."""
        for i, (name, _) in enumerate(API_COUNTERS):
            self._measured[i] = self._measured_before[i] + counters.get(name, 0)
