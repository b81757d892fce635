"""Limits the number of drafts of each request so that drafts increase the speed.

With k drafts, each of which is right with probability a, a step brings 1 + a + ... + a^k tokens. It
takes 1 + gap + k x price times as long as a step without drafts. For each request, the number that
brings the most tokens per time at its own acceptance is chosen, or none if no number gains enough.
Price and gap are measured. The price is the time that a draft adds to a step: its share of the
draft model's time, and its row in the verification. The gap is the time between steps, since a step
with drafts is not decided before the results of the last one.

While drafts do not increase the speed, no request gets any, and nothing is computed for them,
except for one request at a time that tries them. Trials begin only while all of them together have
taken no more than a small share of the time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from core_proc.options import SchedulerOptions
from core_proc.request import Request
from core_proc.scheduling.acceptance import Acceptance
from core_proc.scheduling.step_costs import DecodeTimes, StepTime, size_class
from protocol.core_worker import ModelRunnerOutput

MIN_GAIN = 1.03
"""Minimum speed with drafts, relative to that without, at which they are used."""
REVIEW_EVERY = 16
"""Number of steps between two reviews of all running requests."""
TRIAL_SHARE = 1 / 64
"""Share of the worker's time that trials may take."""
TRIAL_DRAFTS = 2
TRIAL_POSITIONS = 4
"""Number of drafts that is enough to judge a trial. A trial without a right draft ends after two
steps."""
TRIAL_STEPS = 64
"""Number of steps after which a trial ends if the request gets too few drafts to judge."""
_FIRST_TRIAL_STEPS = 4
_MAX_CREDIT_STEPS = 256
_FIRST_PAUSE, _LONGEST_PAUSE = 64, 256
"""Number of steps after a failed trial, doubled after the next one."""
_RETRY_TOKENS = 32
"""Number of tokens after which a request with wrong drafts gets one again, doubled each time."""
_MAX_RETRY_DOUBLINGS = 5
_OWN_MEMORY, _COMMON_MEMORY = 0.9, 0.98
"""Weight of earlier observations, at each verification."""
_WEIGHT = 0.2
_MAX_MEASURING = 8
"""Consecutive steps without drafts, to measure the time of a step without them."""


@dataclass(slots=True)
class _Extra:
    """The additional time of a step with drafts, relative to a step without them."""

    price: float
    gap: float


class StepKind(NamedTuple):
    """Properties of a step that are known when it is sent."""

    num_tokens: int
    num_sampling: int
    num_drafts: int
    num_drafting: int
    """Number of requests with drafts."""
    catches_up: bool
    """True if a request may get drafts again: the draft model then computes the tokens it
    skipped."""

    @property
    def only_decodes(self) -> bool:
        return self.num_tokens == self.num_sampling + self.num_drafts


class DraftLimits:
    """Measures acceptance and times, and sets `Request.draft_limit`."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._max_drafts = options.num_speculative_tokens
        self.is_adaptive = options.adaptive_speculation
        self._has_model = options.has_draft_model
        self._num_stages = options.pipeline_parallel_size
        self.is_active = not self._has_model
        """True if drafts currently pay for a request without observations."""
        self.changed: dict[int, Request] = {}
        """Requests whose limit the worker does not know yet."""
        self._times = DecodeTimes()
        self._extras: dict[int, _Extra] = {}
        """The additional time for each rounded number of requests with drafts."""
        self._common = Acceptance() if self._has_model else Acceptance(3.0, 4.0)
        self._prompt_token_ns = 0.0
        self._credit_ns: float | None = None
        """Time that trials may take now; None until the time of a step is known."""
        self._trial: Request | None = None
        self._trial_steps = 0
        self._is_review_due = False
        self._num_steps = 0
        self._num_unmeasured = 0
        """Steps since the time of a step without drafts became unknown."""
        self._trial_from = 0
        self._trial_pause = _FIRST_PAUSE

    # What a request gets ------------------------------------------------------------------------

    def admitted(self, request: Request, num_running: int) -> None:
        """Set the limit of a request that is introduced; the worker assumes the maximum."""
        if request.sampling_params.pooling is not None:
            return
        request.draft_limit = self._max_drafts
        if self.is_adaptive:
            self._set(request, self._depth(request, num_running) if self.is_active else 0)

    def verified(self, request: Request, num_drafts: int, num_right: int, num_running: int) -> None:
        """Record how many drafts were right, and set the request's limit accordingly."""
        if not self.is_adaptive:
            return
        acceptance = request.acceptance = request.acceptance or Acceptance()
        acceptance.observe(num_drafts, num_right, _OWN_MEMORY)
        self._common.observe(num_drafts, num_right, _COMMON_MEMORY)
        if request is self._trial:
            self._judge(request, acceptance, num_running)
        elif self.is_active:
            limit = self._depth(request, num_running)
            if limit == 0:
                doublings = min(request.num_draft_failures, _MAX_RETRY_DOUBLINGS)
                request.drafts_from = request.num_tokens + (_RETRY_TOKENS << doublings)
                request.num_draft_failures += 1
            else:
                request.num_draft_failures = 0
            self._set(request, limit)

    def _set(self, request: Request, limit: int) -> None:
        if limit != request.draft_limit:
            request.draft_limit = limit
            self.changed[request.req_id] = request

    def _depth(self, request: Request, num_running: int) -> int:
        acceptance = request.acceptance or Acceptance()
        return self._best_depth(acceptance.rate(self._common_rate), num_running)

    @property
    def _common_rate(self) -> float:
        return self._common.right / self._common.tested if self._common.tested else 0.0

    def _in_step(self, num_running: int) -> int:
        """Return the number of running requests in a step; steps in flight share them."""
        return -(-num_running // self._num_stages)

    def _best_depth(self, rate: float, num_running: int) -> int:
        num_drafting = self._in_step(num_running)
        extra = self._extra(num_drafting)
        # If the price is not known for about this number of requests, it is measured first.
        is_known = any(2 * size >= num_drafting for size in self._extras)
        max_depth = self._max_drafts if is_known else min(self._max_drafts, TRIAL_DRAFTS)
        best, best_speed = 0, MIN_GAIN
        tokens = power = 1.0
        for depth in range(1, max_depth + 1):
            power *= rate
            tokens += power
            speed = tokens / (1.0 + extra.gap + depth * extra.price)
            if speed > best_speed:
                best, best_speed = depth, speed
        return best

    def _extra(self, num_drafting: int) -> _Extra:
        """Return the measurement for this number of requests, or for the next smaller one."""
        sizes = [size for size in self._extras if size <= num_drafting]
        if sizes:
            return self._extras[max(sizes)]
        return _Extra(0.25 if self._has_model else 0.05, 0.05)

    # All requests -------------------------------------------------------------------------------

    def review(self, running: Sequence[Request]) -> None:
        """Review all running requests from time to time: who gets drafts, and who tries them."""
        if not self.is_adaptive:
            return
        self._num_steps += 1
        if not self._is_review_due and self._num_steps % REVIEW_EVERY:
            return
        self._is_review_due = False
        num_running = len(running)
        self.is_active = self._best_depth(self._common_rate, num_running) > 0
        if self.is_active:
            self._trial = None
            for request in running:
                is_off = request.draft_limit == 0 and request.sampling_params.pooling is None
                if is_off and request.num_tokens >= request.drafts_from:
                    self._set(request, max(1, self._depth(request, num_running)))
            return
        self._follow_trial()
        for request in running:
            if request is not self._trial:
                self._set(request, 0)
                request.drafts_from = 0
        if self._trial is None:
            self._begin_trial(running)

    def _follow_trial(self) -> None:
        trial = self._trial
        if trial is None:
            return
        self._trial_steps += REVIEW_EVERY
        if trial.draft_limit == 0 or trial.is_finished or self._trial_steps > TRIAL_STEPS:
            self._trial = None

    def _begin_trial(self, running: Sequence[Request]) -> None:
        """Begin a trial with the request for which the draft model has least to compute."""
        plain = self._times.of(self._in_step(len(running)))
        if plain is None or self._credit_ns is None or self._num_steps < self._trial_from:
            return
        candidates = [
            request
            for request in running
            if request.num_output_tokens > 0
            and request.sampling_params.pooling is None
            and request.max_num_tokens - request.num_tokens > 4 * TRIAL_POSITIONS
        ]
        if not candidates:
            return
        request = min(candidates, key=lambda one: (one.num_draft_failures, one.num_tokens))
        extra = self._extra(1)
        num_tokens = request.num_tokens if self._has_model else 0
        expected_ns = num_tokens * self._prompt_token_ns * extra.price
        expected_ns += TRIAL_POSITIONS * extra.price * plain.compute_ns
        if expected_ns <= self._credit_ns:
            self._trial, self._trial_steps = request, 0
            request.acceptance = Acceptance()
            self._set(request, min(self._max_drafts, TRIAL_DRAFTS))

    def _judge(self, request: Request, acceptance: Acceptance, num_running: int) -> None:
        is_hopeless = acceptance.right == 0.0 and acceptance.tested > 1.0
        if not is_hopeless and acceptance.tested < TRIAL_POSITIONS:
            return
        self._common = Acceptance(acceptance.right, acceptance.tested)
        self._trial = None
        self._is_review_due = True
        request.num_draft_failures += 1
        if self._best_depth(self._common_rate, num_running) == 0:
            self._set(request, 0)
            self._trial_from = self._num_steps + self._trial_pause
            self._trial_pause = min(2 * self._trial_pause, _LONGEST_PAUSE)
        else:
            self._trial_pause = _FIRST_PAUSE

    # Times --------------------------------------------------------------------------------------

    @property
    def is_measuring(self) -> bool:
        """True while steps run without drafts to measure their time."""
        return 0 < self._num_unmeasured % (4 * _MAX_MEASURING) <= _MAX_MEASURING

    def step_ended(self, kind: StepKind, output: ModelRunnerOutput, num_right: int) -> None:
        """Record the times of a step, which has brought `num_right` right drafts."""
        if not self.is_adaptive or output.forward_ns == 0:
            return
        self._times.step()
        compute_ns = max(1, output.forward_ns - output.draft_ns)  # a divisor, so not 0
        if not kind.only_decodes:
            if kind.num_tokens >= 2 * kind.num_sampling + 16:
                per_token = compute_ns / kind.num_tokens
                weight = _WEIGHT if self._prompt_token_ns else 1.0
                self._prompt_token_ns += (per_token - self._prompt_token_ns) * weight
        elif kind.num_drafts == 0 and kind.num_sampling:
            self._times.observe(kind.num_sampling, compute_ns, output.wait_ns)
        plain = self._times.of(kind.num_sampling) if kind.num_sampling else None
        if plain is not None:
            self._pay(kind, output, num_right, plain)
            if kind.only_decodes and kind.num_drafts and not kind.catches_up:
                self._measure(kind, output, plain)
            self._num_unmeasured = 0
        elif self.is_active and kind.num_sampling and (kind.only_decodes or self.is_measuring):
            self._num_unmeasured += 1  # prompts in every step must not prevent drafts for long

    def _measure(self, kind: StepKind, output: ModelRunnerOutput, plain: StepTime) -> None:
        size = size_class(kind.num_drafting)
        alone = self._times.of(kind.num_drafting) or plain
        passes = kind.num_drafts / kind.num_drafting
        price = max(0.0, output.forward_ns - plain.compute_ns) / passes / alone.compute_ns
        gap = max(0.0, output.wait_ns - plain.wait_ns) / plain.compute_ns
        extra = self._extras.get(size)
        if extra is None:
            self._extras[size] = _Extra(min(price, 1.0), min(gap, 1.0))
            return
        extra.price += (min(price, 2 * extra.price + 0.1) - extra.price) * _WEIGHT
        extra.gap += (min(gap, 2 * extra.gap + 0.1) - extra.gap) * _WEIGHT

    def _pay(
        self, kind: StepKind, output: ModelRunnerOutput, num_right: int, plain: StepTime
    ) -> None:
        """Add a share of the step's time to the credit for trials, and subtract their cost."""
        if self._credit_ns is None:
            self._credit_ns = _FIRST_TRIAL_STEPS * plain.compute_ns
            self._is_review_due = True
        self._credit_ns += TRIAL_SHARE * output.forward_ns
        if not self.is_active and (self._trial is not None or kind.num_drafts):
            token_ns = plain.compute_ns / max(kind.num_sampling, 1)
            self._credit_ns -= output.draft_ns + (kind.num_drafts - num_right) * token_ns
        max_ns = _MAX_CREDIT_STEPS * plain.compute_ns
        self._credit_ns = min(max(self._credit_ns, -max_ns), max_ns)
