"""Limits a step's prompt tokens, so that decoding requests get tokens at a target interval.

A decoding request gets one token per step, so the duration of a step is the gap between two of its
tokens. The time added by a prompt token is measured, and a step gets as many prompt tokens as fit
in the target. With fewer prompt tokens the gaps are shorter, but the prompt's first token is later.
"""

from collections import deque
from typing import NamedTuple

from core_proc.options import SchedulerOptions
from core_proc.scheduling.step_costs import DecodeTimes
from protocol.core_worker import ModelRunnerOutput

MIN_TOKENS = 16
"""Prompt tokens that a step always computes, even if decoding alone exceeds the target."""
_FIRST_TOKENS = 64
"""Prompt tokens of the first step, when no time is known yet."""
_AIM = 0.85
"""Share of the target that is aimed at, since the duration of steps varies."""
_FALL = 0.1
"""Weight of a step in which a token took less time than before. A longer time counts fully, because
the time grows with the position in a prompt, and steps in flight are already too long."""


class _Step(NamedTuple):
    num_decoded: int
    num_prompt_tokens: int


class PromptBudget:
    """Measures steps, and limits the prompt tokens of the next one."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._target_ns = options.target_itl_ms * 1e6
        self.is_on = self._target_ns > 0
        self._decode_times = DecodeTimes()
        self._decode_ns = 0.0
        """Time of the last step without prompt tokens."""
        self._token_ns = 0.0
        self._steps: deque[_Step] = deque()
        """The steps in flight."""

    def num_tokens(self, num_decoding: int) -> int | None:
        """Return the limit of a step's prompt tokens; None: no limit, since nothing decodes."""
        if num_decoding == 0:
            return None
        if self._token_ns == 0.0:
            return _FIRST_TOKENS
        left_ns = _AIM * self._target_ns - self._decoding_ns(num_decoding)
        return max(MIN_TOKENS, int(left_ns / self._token_ns))

    def _decoding_ns(self, num_decoding: int) -> float:
        known = self._decode_times.of(num_decoding)
        return self._decode_ns if known is None else known.compute_ns + known.wait_ns

    def sent(self, num_tokens: int, num_prompt_tokens: int) -> None:
        if self.is_on:
            self._steps.append(_Step(num_tokens - num_prompt_tokens, num_prompt_tokens))

    def step_ended(self, output: ModelRunnerOutput) -> None:
        """Record the duration of the oldest step in flight."""
        if not self.is_on:
            return
        num_decoded, num_prompt_tokens = self._steps.popleft()
        self._decode_times.step()
        if output.forward_ns == 0 or num_decoded == 0:
            return
        if num_prompt_tokens == 0:
            # Drafts count as rows here, so with drafts the last step's time is usually used.
            self._decode_times.observe(num_decoded, output.forward_ns, output.wait_ns)
            self._decode_ns = float(output.forward_ns + output.wait_ns)
        elif num_prompt_tokens >= MIN_TOKENS:
            # A wait is not counted: it has other causes than this step.
            added_ns = output.forward_ns - self._decoding_ns(num_decoded)
            token_ns = max(added_ns, 0.1 * output.forward_ns) / num_prompt_tokens
            if self._token_ns == 0.0:
                self._token_ns = token_ns
            if token_ns > self._token_ns:
                self._token_ns = min(token_ns, 2 * self._token_ns)
            else:
                self._token_ns += (token_ns - self._token_ns) * _FALL

    def workers_lost(self) -> None:
        """Forget the steps in flight, which will never be answered."""
        self._steps.clear()
