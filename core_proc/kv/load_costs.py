"""Measures whether reading KV blocks takes less time than computing them.

The stores of this machine have one cost, and each other machine has its own.
"""

from collections import deque

from protocol.core_worker import ModelRunnerOutput

_MIN_TOKENS = 64
"""Minimum number of prompt tokens in a step that is used to measure the cost of a token."""
_RISE, _FALL = 0.2, 0.5
"""Weights of a measurement: a faster load counts more, because slow ones are rarely retried."""
_TRIAL_EVERY = 16
"""One in this many loads that do not pay is made, since the reason may have ended."""
_MAX_SOURCES = 256
_SLOWEST = 2.0
"""A machine counts as at most this many times slower than computing, since the cause may end."""
_MIN_LIMIT_MS = 1000
_LONGEST_LIMIT_MS = 10_000


class LoadCosts:
    """Measures the time for each token that is read, and for each that is computed."""

    def __init__(self) -> None:
        self._computed_ns = 0.0
        self._loaded_ns: dict[str, float] = {}
        """The mean time of a loaded token by machine; the name of this one is empty."""
        self._num_refused: dict[str, int] = {}
        """Number of loads that did not pay, by machine."""
        self._steps: deque[tuple[int, int]] = deque()
        """All tokens, and prompt tokens, of each step in flight."""

    def pays(self, source: str = "") -> bool:
        """Return whether reading takes less time than computing, as far as is known."""
        return self._computed_ns == 0.0 or self._loaded_ns.get(source, 0.0) < self._computed_ns

    def try_load(self, source: str = "") -> bool:
        """Return whether to read stored blocks; a few of the loads that do not pay are tried."""
        if self.pays(source):
            return True
        num_refused = self._num_refused[source] = self._num_refused.get(source, 0) + 1
        return num_refused % _TRIAL_EVERY == 0

    def limit_ms(self, num_tokens: int) -> int:
        """Return the longest time for reading tokens from another machine; 0: it is not known.

        It is the time in which they could be computed.
        """
        if self._computed_ns == 0.0:
            return 0
        computed_ms = int(num_tokens * self._computed_ns / 1e6)
        return min(max(computed_ms, _MIN_LIMIT_MS), _LONGEST_LIMIT_MS)

    def loaded(self, num_tokens: int, load_ns: int, source: str = "") -> None:
        """Record the duration of a load and its number of tokens."""
        if load_ns <= 0:
            return
        token_ns = load_ns / max(num_tokens, 1)
        if source and self._computed_ns:
            token_ns = min(token_ns, _SLOWEST * self._computed_ns)
        if source not in self._loaded_ns and len(self._loaded_ns) >= _MAX_SOURCES:
            oldest = next(key for key in self._loaded_ns if key)
            del self._loaded_ns[oldest]
            self._num_refused.pop(oldest, None)
        self._loaded_ns[source] = _mean(self._loaded_ns.get(source, 0.0), token_ns)

    def sent(self, num_tokens: int, num_prompt_tokens: int) -> None:
        self._steps.append((num_tokens, num_prompt_tokens))

    def step_ended(self, output: ModelRunnerOutput) -> None:
        """Record the duration of the oldest step in flight, if it mostly computed prompts."""
        num_tokens, num_prompt_tokens = self._steps.popleft()
        if output.forward_ns and num_prompt_tokens >= max(_MIN_TOKENS, num_tokens // 2):
            self._computed_ns = _mean(self._computed_ns, output.forward_ns / num_tokens)

    def workers_lost(self) -> None:
        """Forget the steps in flight, which will never be answered."""
        self._steps.clear()


def _mean(before: float, new: float) -> float:
    if before == 0.0:
        return new
    return before + (new - before) * (_RISE if new > before else _FALL)
