"""The runner of a pipeline stage other than the last: it computes its layers, and samples nothing.

Its mirror applies the same steps as the mirror of the last stage, with stand-ins (negative numbers)
for the sampled tokens. The first stage replaces the stand-ins by the tokens when it needs them as
inputs.

With speculation, the number of a request's tokens after a step that verifies drafts depends on the
results of the last stage. The core schedules the request again once it has these results, and each
stage takes the results before it applies such a step. Each stage has separate blocks for the states
of its recurrent layers before the drafts.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from protocol.core_worker import ModelRunnerOutput, SchedulerOutput
from protocol.process.failpoints import failpoint
from worker_proc.errors import MirrorError
from worker_proc.forward import state_pool_of
from worker_proc.inputs import pack_step
from worker_proc.loading.model_with_cache import ModelWithCache
from worker_proc.mirror import Mirror
from worker_proc.parallel.exchange import RankExchange
from worker_proc.parallel.stage_part import StagePart
from worker_proc.parallel.step_results import unpack_results
from worker_proc.request import ScheduledRequest
from worker_proc.runner import ComputedStep, LaunchedStep


class _Sampling(NamedTuple):
    """The parts of a computed step whose tokens the last stage samples."""

    number: int
    """The number of the step, counted from 1 since the adoption."""
    parts: Sequence[ScheduledRequest]
    verifies: bool
    """True if some of the parts have drafts; the mirror has not advanced these parts yet."""


class StageRunner:
    """Computes the layers of one stage in each step, and passes the rows to the next stage."""

    draft_blocks = None

    def __init__(
        self, model: ModelWithCache, part: StagePart, exchange: RankExchange | None = None
    ) -> None:
        """`exchange` connects this rank with the other ranks of its stage, if there are any."""
        loaded, adapters = model.loaded, model.adapters
        self._model = loaded.model
        self._device = loaded.device
        self.facts = model.facts
        self.attention = model.backend.name
        self._backend = model.backend
        self._pool = model.pool
        self._states = state_pool_of(loaded.model)
        self._part = part
        self._pipe = part.pipe
        self._exchange = exchange
        self._adapters = adapters
        self.adapters = None if adapters is None else adapters.kept
        self._mirror = Mirror(
            model.facts, model.num_speculative_tokens, self.adapters, model.num_draft_states
        )
        self._is_drafting = model.num_speculative_tokens > 0
        self.swap_cost_tokens = model.swap_cost_tokens
        self.grammars = model.grammars
        self.block_memory = model.block_memory
        self.state_memory = model.state_memory
        self._num_computed = 0
        self._pending: deque[_Sampling] = deque()
        """Steps whose tokens are stand-ins in the mirror; empty in a stage that needs no tokens."""

    def on_wait(self, report: Callable[[], None]) -> None:
        self._pipe.on_wait(report)

    def reset(self, epoch: int = 0) -> None:
        self._pipe.begin(epoch)
        if self._exchange is not None:
            self._exchange.begin(epoch)
        self._mirror.reset()
        self._num_computed = 0
        self._pending.clear()

    def leave(self) -> None:
        self._pipe.leave()

    def sleep(self) -> None:
        self._mirror.check_empty()
        self._pool.sleep()
        self._mirror.forget_blocks()

    def prepare_memory(self, *, is_idle: bool = True) -> bool:
        return self._pool.allocate_ahead(self._mirror.highest_block, is_idle=is_idle)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self.launch(step).finish()

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        began_ns = time.perf_counter_ns()
        if self._is_drafting:
            self._take_results(step)
        scheduled = self._mirror.apply(step)
        for new in step.scheduled_new_reqs:
            # Edits of scores count tokens, and this stage has stand-ins and no scores.
            self._mirror.requests[new.req_id].edits = None
        self._pool.swap(step.swap_out, step.swap_in)
        if self._states is not None:
            self._states.swap(self._mirror.state_swap_out, step.state_swap_in)
        if scheduled:
            self._pool.wake()
            self._compute(scheduled)
        forward_ns = time.perf_counter_ns() - began_ns
        return ComputedStep(ModelRunnerOutput(step.step_id, [], forward_ns=forward_ns))

    def _compute(self, scheduled: list[ScheduledRequest]) -> None:
        self._num_computed += 1
        if self._pipe.stage.is_first:
            self._take_tokens(scheduled)
        inputs = pack_step(scheduled, self._device)
        if self._adapters is not None:
            self._adapters.begin_step(inputs)
        vocab_size = self.facts.vocab_size
        self._part.compute_logits(self._model, self._backend, inputs, vocab_size)
        failpoint("worker.mid_step")
        self._pipe.send(self._part.model.rows()[0])
        self._advance(scheduled, inputs.sampling)

    def _advance(
        self, scheduled: list[ScheduledRequest], sampling: Sequence[ScheduledRequest]
    ) -> None:
        """Advance the mirror over all parts but those that verify drafts."""
        num_verifying = 0
        if self._is_drafting:
            others = [part for part in scheduled if not part.num_drafts]
            num_verifying, scheduled = len(scheduled) - len(others), others
        self._mirror.advance(scheduled, [~place for place in range(len(sampling) - num_verifying)])
        if self._pipe.stage.is_first or self._is_drafting:
            self._pending.append(_Sampling(self._num_computed, sampling, num_verifying > 0))

    def _take_tokens(self, scheduled: Sequence[ScheduledRequest]) -> None:
        """Replace stand-ins by tokens: all that a step needs, and others that are available."""
        pending = self._pending
        while pending and (
            len(pending) > self._pipe.max_steps_behind
            or any(_has_stand_in(part) for part in scheduled)
            or self._pipe.has_tokens(pending[0].number)
        ):
            self._take_next()

    def _take_results(self, step: SchedulerOutput) -> None:
        """Take the results that a step depends on, before the step is applied."""
        pending = self._pending
        while pending and (
            len(pending) > self._pipe.max_steps_behind
            or self._depends_on_results(step)
            or self._pipe.has_tokens(pending[0].number)
        ):
            self._take_next()

    def _depends_on_results(self, step: SchedulerOutput) -> bool:
        """Return whether a step has a request whose length or drafts depend on pending results.

        A request that the step preempts counts, too: the state that is copied depends on the number
        of correct drafts.

        If the last stage has several ranks, only the first of them has certainly published its
        results when the core has them.
        """
        requests, counts = self._mirror.requests, step.num_scheduled_tokens
        for _, parts, verifies in self._pending:
            for part in parts:
                request = part.request
                if requests.get(request.req_id) is not request:
                    continue  # it has left the mirror
                count = counts.get(request.req_id, 1) if counts else 1
                if count and verifies and part.num_drafts:
                    return True
                if count > 1 and request.num_computed_tokens + count > request.num_tokens:
                    return True
        return False

    def _take_next(self) -> None:
        """Take the tokens of the oldest pending step, and the drafts that follow them."""
        number, parts, _ = self._pending.popleft()
        words = self._pipe.tokens(number)
        if not self._is_drafting:
            for part, token_id in zip(parts, words, strict=True):
                part.request.token_ids[part.end] = token_id
            return
        for part, result in zip(parts, unpack_results(words), strict=True):
            request = part.request
            if self._mirror.requests.get(request.req_id) is not request:
                continue  # it has left the mirror
            if part.num_drafts:
                self._mirror.advance([part], result.token_ids, [len(result.token_ids)])
            else:
                (request.token_ids[part.end],) = result.token_ids
            num_taken = self._mirror.take_drafts(request, result.drafts)
            if num_taken < len(result.drafts):
                raise MirrorError(
                    f"request {request.req_id} got {len(result.drafts)} drafts, and there are"
                    f" blocks for the states before {num_taken}"
                )


def _has_stand_in(part: ScheduledRequest) -> bool:
    """Return whether the last known token that a part computes is a stand-in."""
    known = part.request.token_ids
    return known[min(part.end, len(known)) - 1] < 0
