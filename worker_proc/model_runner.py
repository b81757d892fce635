"""The runner with a model: packs a step, runs the model over the paged cache, samples."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from protocol.core_worker import ModelRunnerOutput, SchedulerOutput
from protocol.process.failpoints import failpoint
from worker_proc.drafting.draft_model import DraftModel
from worker_proc.drafting.drafter import Drafter
from worker_proc.forward import compute_logits, state_pool_of
from worker_proc.grammar.following import follow
from worker_proc.inputs import SteadyDecode, StepInputs, pack_step, with_token_types
from worker_proc.loading.host_limits import available_cpus
from worker_proc.loading.model_with_cache import ModelWithCache
from worker_proc.mirror import Mirror
from worker_proc.offload.drafts import DraftBlocks
from worker_proc.parallel.exchange import RankExchange
from worker_proc.parallel.shared_drafts import SharedDrafts
from worker_proc.parallel.stage_part import StagePart
from worker_proc.parallel.step_results import RequestResult, pack_results
from worker_proc.request import ScheduledRequest
from worker_proc.runner import ComputedStep, LaunchedStep
from worker_proc.sampling.pooling import captured_hidden_states, pool
from worker_proc.sampling.sampler import Sampler
from worker_proc.sampling.step_sampler import NOT_FINITE, StepSampler, StepTokens
from worker_proc.step_timer import Arrival, StepClock

if TYPE_CHECKING:
    from worker_proc.cuda.steps_ahead import SampledStep, StepsAhead

_MAX_MASK_THREADS = 8


class ModelRunner:
    """Executes steps with a loaded model and its KV pool.

    On CUDA, `launch` returns before a step is computed if its tokens are sampled on the device, and
    the next step may then be launched. Any other step waits for the one before it.
    """

    def __init__(
        self,
        model: ModelWithCache,
        sampler: Sampler,
        *,
        draft_model: DraftModel | None = None,
        draft_blocks: DraftBlocks | None = None,
        shared_drafts: SharedDrafts | None = None,
        steps_ahead: "StepsAhead | None" = None,
        exchange: RankExchange | None = None,
        stage: StagePart | None = None,
    ) -> None:
        """Run the steps of a model; `sampler` or the device samples the tokens.

        Args:
            draft_blocks: the draft model's blocks that may be kept in stores.
            shared_drafts: shares the drafts of the rank that has the draft model.
            steps_ahead: launches the steps that a device can compute alone.
            exchange: connects the ranks that compute the same steps.
            stage: this stage, which is the last one, of a model in several stages.
        """
        loaded, adapters = model.loaded, model.adapters
        self._loaded = loaded
        self._model = loaded.model
        self.facts = model.facts
        self.attention = model.backend.name
        self._backend = model.backend
        self._pool = model.pool
        self._states = state_pool_of(loaded.model)
        num_mask_threads = min(_MAX_MASK_THREADS, available_cpus())
        self._sampler = StepSampler(
            sampler, model.facts, model.grammars, num_mask_threads=num_mask_threads
        )
        self._adapters = adapters
        self.adapters = None if adapters is None else adapters.kept
        self._mirror = Mirror(
            model.facts, model.num_speculative_tokens, self.adapters, model.num_draft_states
        )
        self.swap_cost_tokens = model.swap_cost_tokens
        self._num_draft_states = model.num_draft_states
        self._times = StepClock()
        self.grammars = model.grammars
        self._steps_ahead = steps_ahead
        self._graphs = None if steps_ahead is None else steps_ahead.graphs
        self._exchange = exchange
        self._stage = stage
        self.block_memory = model.block_memory
        self.state_memory = model.state_memory
        self.draft_blocks = draft_blocks
        self._drafter: Drafter | None = None
        if model.num_speculative_tokens > 0:
            self._drafter = self._make_drafter(draft_model, shared_drafts)
        self._launched: SampledStep | None = None
        """The last step, if its tokens may not be known yet."""
        self._steady: SteadyDecode | None = None
        """The decode step that may follow the last step; None: the next step is built anew."""

    def _make_drafter(self, model: DraftModel | None, shared: SharedDrafts | None) -> Drafter:
        share = None if shared is None else shared.share
        return Drafter(self._mirror, model, share, self._min_draft_states())

    def on_wait(self, report: Callable[[], None]) -> None:
        if self._exchange is not None:
            self._exchange.on_wait(report)
        if self._stage is not None:
            self._stage.pipe.on_wait(report)

    def reset(self, epoch: int = 0) -> None:
        if self._exchange is not None:
            self._exchange.begin(epoch)
        if self._stage is not None:
            self._stage.pipe.begin(epoch)
        self._mirror.reset()
        if self._drafter is not None:
            self._drafter.reset()
        self._launched = None
        self._steady = None

    def leave(self) -> None:
        if self._exchange is not None:
            self._exchange.leave()
        if self._stage is not None:
            self._stage.pipe.leave()

    def sleep(self) -> None:
        self._mirror.check_empty()
        self._steady = None
        if self._graphs is not None:  # first: the pool also releases what the allocator caches
            self._graphs.forget()
        self._pool.sleep()
        self._mirror.forget_blocks()
        if self._drafter is not None:
            self._drafter.sleep()

    def prepare_memory(self, *, is_idle: bool = True) -> bool:
        return self._pool.allocate_ahead(self._mirror.highest_block, is_idle=is_idle)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self.launch(step).finish()

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        arrival = Arrival(time.perf_counter_ns(), bool(self._mirror.requests))
        if self._exchange is not None:
            self._exchange.begin_step()
        steady, self._steady = self._steady, None
        if steady is not None and self._mirror.move_on(step):
            return ComputedStep(self._compute_steady(step.step_id, steady, arrival))
        scheduled = self._mirror.apply(step)
        before, self._launched = self._launched, None
        ahead = self._steps_ahead
        if ahead is not None and self._drafter is None and ahead.can_compute(scheduled):
            self._launched = self._launch(ahead, step, scheduled, arrival)
            return self._launched
        if before is not None:
            before.finish()
        return ComputedStep(self._compute(step, scheduled, arrival))

    def _launch(
        self,
        ahead: "StepsAhead",
        step: SchedulerOutput,
        scheduled: list[ScheduledRequest],
        arrival: Arrival,
    ) -> "SampledStep":
        """Launch a step whose tokens are placeholders until the host reads them."""
        self._pool.swap(step.swap_out, step.swap_in)
        self._pool.wake()
        inputs = pack_step(scheduled, self._loaded.device)
        launched = ahead.launch(step.step_id, inputs, partial(self._times.end, arrival))
        failpoint("worker.mid_step")
        self._mirror.advance(scheduled, [~place for place in range(len(inputs.sampling))])
        return launched

    def _compute(
        self, step: SchedulerOutput, scheduled: list[ScheduledRequest], arrival: Arrival
    ) -> ModelRunnerOutput:
        """Compute a step whose tokens are needed on the host."""
        self._change_blocks(step)
        if not scheduled:
            return ModelRunnerOutput(step.step_id, [])
        inputs = self._pack(scheduled)
        masks = self._sampler.begin_masks(inputs) if self._mirror.num_constrained else None
        with captured_hidden_states(self._model if self._mirror.pooling else None) as hidden:
            logits = self._compute_logits(inputs)
        failpoint("worker.mid_step")
        row_masks = None if masks is None else masks.result()
        sampled = self._sampler.sample(inputs, logits, row_masks)
        errors = sampled.errors
        pooled, pooling_errors = self._pooled(scheduled, inputs, hidden.rows)
        errors |= pooling_errors
        self._agree(sampled.token_ids)
        if self._drafter is None:
            self._publish(sampled.token_ids)
        prompt_logprobs = self._sampler.prompt_logprobs(inputs, logits)
        self._mirror.advance(scheduled, sampled.token_ids, sampled.num_tokens)
        if masks is not None:
            errors |= follow(scheduled)
        drafts, draft_ns = self._draft(scheduled, inputs, sampled)
        if self._starts_steady_decode(inputs):
            self._steady = SteadyDecode(inputs, self.facts.block_size)
        forward_ns, wait_ns = self._times.end(arrival)
        return ModelRunnerOutput(
            step.step_id,
            sampled.token_ids,
            sampled.num_tokens,
            drafts,
            sampled.logprobs,
            prompt_logprobs,
            forward_ns,
            errors,
            pooled,
            draft_ns,
            wait_ns,
        )

    def _change_blocks(self, step: SchedulerOutput) -> None:
        """Copy swapped blocks, and record which blocks get other contents."""
        if self._drafter is not None:
            self._drafter.follow(step)
        self._pool.swap(step.swap_out, step.swap_in)
        if self._states is not None:
            self._states.swap(self._mirror.state_swap_out, step.state_swap_in)

    def _pack(self, scheduled: list[ScheduledRequest]) -> StepInputs:
        """Return the model's inputs, with everything that the forward reads in place."""
        self._pool.wake()
        inputs = pack_step(scheduled, self._loaded.device)
        if self._loaded.has_token_types:
            inputs = with_token_types(inputs)
        if self._adapters is not None:
            self._adapters.begin_step(inputs)
        return inputs

    def _pooled(
        self, scheduled: list[ScheduledRequest], inputs: StepInputs, rows: torch.Tensor | None
    ) -> tuple[dict[int, bytes], dict[int, str]]:
        """Return the vectors of requests with pooling, and the errors of those without one."""
        pooling = self._mirror.pooling
        if not pooling:
            return {}, {}
        vectors, not_finite = pool(scheduled, inputs.first_rows, pooling, rows, self._loaded.head)
        return vectors, dict.fromkeys(not_finite, NOT_FINITE)

    def _draft(
        self, scheduled: list[ScheduledRequest], inputs: StepInputs, sampled: StepTokens
    ) -> tuple[list[int], int]:
        """Make the drafts for the next step; returns their numbers, and the time in ns."""
        if self._drafter is None:
            return [], 0
        begun_ns = time.perf_counter_ns()
        drafts = self._drafter.draft(scheduled)
        self._publish_drafted(inputs.sampling, sampled.token_ids, sampled.num_tokens)
        return drafts, time.perf_counter_ns() - begun_ns

    def _starts_steady_decode(self, inputs: StepInputs) -> bool:
        """Return whether the inputs of the next step may be derived from those of this one."""
        if self._drafter is not None or self._loaded.device.type != "cpu":
            return False
        if self._mirror.num_constrained or self._mirror.pooling or not self.facts.generates:
            return False
        return SteadyDecode.can_follow(inputs, len(self._mirror.requests))

    def _compute_steady(
        self, step_id: int, steady: SteadyDecode, arrival: Arrival
    ) -> ModelRunnerOutput:
        """Compute the next token of the same requests as in the step before."""
        inputs = steady.move_on()
        logits = self._compute_logits(inputs)
        failpoint("worker.mid_step")
        sampled = self._sampler.sample_rows(steady.requests, logits)
        self._agree(sampled.token_ids)
        self._publish(sampled.token_ids)
        self._mirror.append(sampled.token_ids)
        self._steady = steady
        forward_ns, wait_ns = self._times.end(arrival)
        return ModelRunnerOutput(
            step_id,
            sampled.token_ids,
            logprobs=sampled.logprobs,
            forward_ns=forward_ns,
            request_errors=sampled.errors,
            wait_ns=wait_ns,
        )

    def _agree(self, token_ids: Sequence[int]) -> None:
        """Compare a step's tokens with those of the other ranks of this stage."""
        if self._exchange is not None:
            self._exchange.agree(token_ids)

    def _publish(self, words: Sequence[int]) -> None:
        """Pass a step's tokens to other stages."""
        if self._stage is not None:
            self._stage.pipe.publish(words)

    def _publish_drafted(
        self, parts: Sequence[ScheduledRequest], token_ids: list[int], num_tokens: list[int]
    ) -> None:
        """Pass a step's tokens, and the drafts after them, to other stages."""
        if self._stage is None:
            return
        results: list[RequestResult] = []
        first = 0
        for part, count in zip(parts, num_tokens or [1] * len(parts), strict=True):
            tokens = token_ids[first : first + count]
            results.append(RequestResult(tokens, part.request.draft_token_ids))
            first += count
        self._publish(pack_results(results))

    def _min_draft_states(self) -> Callable[[], int] | None:
        """Return a function for the number of draft states that all ranks have; None: one rank.

        The ranks compare their numbers when it is called, in the first step with drafts.
        """
        if self._states is None:
            return None
        if self._stage is not None:
            pipe = self._stage.pipe
            return lambda: pipe.min_draft_states
        if self._exchange is not None:
            return partial(self._exchange.minimum, self._num_draft_states)
        return None

    def _compute_logits(self, inputs: StepInputs) -> torch.Tensor:
        if self._stage is not None:
            vocab_size = self.facts.vocab_size
            return self._stage.compute_logits(self._model, self._backend, inputs, vocab_size)
        if self._graphs is not None and not self._mirror.pooling:
            logits = self._graphs.compute(inputs)
            if logits is not None:
                return logits
        return compute_logits(self._model, self._backend, inputs, self.facts.vocab_size)
