"""The runner with a model: packs a step, runs the model over the paged cache, samples."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from protocol.core_worker import (
    ModelRunnerOutput,
    PromptLogprobs,
    SchedulerOutput,
    TokenLogprobs,
)
from protocol.process.failpoints import failpoint
from worker_proc.drafting.draft_model import DraftModel
from worker_proc.drafting.repetitions import propose_repetitions
from worker_proc.forward import compute_logits, state_pool_of
from worker_proc.grammar.following import follow, grammar_state_of
from worker_proc.grammar.masks import MaskComputer, MaskedRows, RowMasks
from worker_proc.inputs import SteadyDecode, StepInputs, pack_step, with_token_types
from worker_proc.loading.host_limits import available_cpus
from worker_proc.loading.model_with_cache import ModelWithCache
from worker_proc.mirror import Mirror, MirroredRequest, ScheduledRequest
from worker_proc.offload.drafts import DraftBlocks
from worker_proc.parallel.device_group import DIFFERS
from worker_proc.parallel.exchange import RankExchange, RanksDiffer
from worker_proc.parallel.shared_drafts import SharedDrafts
from worker_proc.parallel.stage_part import StagePart
from worker_proc.parallel.step_results import RequestResult, pack_results
from worker_proc.runner import ComputedStep, LaunchedStep
from worker_proc.sampling.pooling import captured_hidden_states, pool
from worker_proc.sampling.sampler import Sampler
from worker_proc.sampling.verification import DraftedRow, count_valid, rows_to_sample

if TYPE_CHECKING:
    from worker_proc.cuda.device_sampler import DeviceSampler, TokenCopy
    from worker_proc.cuda.graphs import DecodeGraphs

_MAX_MASK_THREADS = 8
NOT_FINITE = "the model's logits for this request are not finite"


class _Sampled(NamedTuple):
    """Tokens that a step sampled; logprobs and errors by request id."""

    token_ids: list[int]
    num_tokens: list[int]  # of each request that sampled; empty: one each
    logprobs: dict[int, list[TokenLogprobs]]
    errors: dict[int, str]


class _Arrival(NamedTuple):
    """When a step arrived, and whether requests were running then."""

    at_ns: int
    finds_requests: bool
    """Else the time before the step does not count as a wait: there was nothing to compute."""


class _StepTimes:
    """Measures steps, each from the end of the one before it if it arrived earlier."""

    def __init__(self) -> None:
        self._ended_ns = time.perf_counter_ns()

    def end(self, arrival: _Arrival) -> tuple[int, int]:
        """End a step now; returns how long it took, and how long the worker waited for it."""
        before, self._ended_ns = self._ended_ns, time.perf_counter_ns()
        wait_ns = max(arrival.at_ns - before, 0) if arrival.finds_requests else 0
        return self._ended_ns - max(arrival.at_ns, before), wait_ns


class _SampledStep:
    """A step whose tokens are sampled on the device, and known to the host later."""

    def __init__(
        self,
        step_id: int,
        parts: Sequence[ScheduledRequest],
        tokens: "TokenCopy",
        end: Callable[[], tuple[int, int]],
    ) -> None:
        """Take the parts that sample, whose requests end in placeholders for their tokens."""
        self._step_id = step_id
        self._parts = parts
        self._tokens = tokens
        self._end = end
        self._output: ModelRunnerOutput | None = None

    @property
    def is_done(self) -> bool:
        return self._output is not None or self._tokens.is_done

    def finish(self) -> ModelRunnerOutput:
        """Wait for the tokens, and give them to their requests."""
        if self._output is None:
            tokens = self._tokens.read()
            errors = {}
            for place, (part, token_id) in enumerate(zip(self._parts, tokens, strict=True)):
                if token_id == DIFFERS:
                    raise RanksDiffer("the ranks have sampled different tokens")
                if token_id < 0:
                    errors[part.request.req_id] = NOT_FINITE
                    tokens[place] = 0
                part.request.token_ids[part.end] = tokens[place]
            forward_ns, wait_ns = self._end()
            self._output = ModelRunnerOutput(
                self._step_id,
                tokens,
                forward_ns=forward_ns,
                request_errors=errors,
                wait_ns=wait_ns,
            )
        return self._output


class ModelRunner:
    """Executes steps with a loaded model and its KV pool.

    On CUDA a step whose tokens are sampled on the device returns from `launch` before it is
    computed, and the next one may be launched then. Any other step waits for the one before it.
    """

    def __init__(
        self,
        model: ModelWithCache,
        sampler: Sampler,
        *,
        draft_model: DraftModel | None = None,
        draft_blocks: DraftBlocks | None = None,
        shared_drafts: SharedDrafts | None = None,
        device_sampler: "DeviceSampler | None" = None,
        graphs: "DecodeGraphs | None" = None,
        exchange: RankExchange | None = None,
        stage: StagePart | None = None,
    ) -> None:
        """Compute all steps of a model, whose tokens `sampler` or `device_sampler` chooses.

        Args:
            draft_blocks: those of `draft_model` that stores keep.
            shared_drafts: gives all ranks the drafts of the one that has the draft model.
            exchange: connects the ranks that compute the same steps.
            stage: this part of a model in several stages, of which it is the last.
        """
        loaded, adapters = model.loaded, model.adapters
        self._model = loaded.model
        self._head = loaded.head
        self._has_token_types = loaded.has_token_types
        self._device = loaded.device
        self.facts = model.facts
        self.attention = model.backend.name
        self._backend = model.backend
        self._pool = model.pool
        self._states = state_pool_of(loaded.model)
        self._sampler = sampler
        self._adapters = adapters
        self.adapters = None if adapters is None else adapters.kept
        self._mirror = Mirror(
            model.facts, model.num_speculative_tokens, self.adapters, model.num_draft_states
        )
        self.swap_cost_tokens = model.swap_cost_tokens
        self._num_draft_states = model.num_draft_states
        self._has_limited_states = False
        """Whether the ranks of this adoption have agreed on the number of draft states."""
        self._is_drafting = model.num_speculative_tokens > 0
        self._draft_model = draft_model
        self._shared_drafts = shared_drafts
        self._times = _StepTimes()
        self.grammars = model.grammars
        self._mask_computer: MaskComputer | None = None
        self._device_sampler = device_sampler
        self._graphs = graphs
        self._exchange = exchange
        self._stage = stage
        self.block_memory = model.block_memory
        self.state_memory = model.state_memory
        self.draft_blocks = draft_blocks
        self._launched: _SampledStep | None = None
        """The step before, if its tokens may not be known yet."""
        self._steady: SteadyDecode | None = None
        """The decode step that may follow the step before; None: the next one is built anew."""

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
        if self._draft_model is not None:
            self._draft_model.reset()
        self._has_limited_states = False
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
        if self._draft_model is not None:
            self._draft_model.sleep()

    def prepare_memory(self) -> bool:
        return self._pool.allocate_ahead(self._mirror.highest_block)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        return self.launch(step).finish()

    @torch.inference_mode()
    def launch(self, step: SchedulerOutput) -> LaunchedStep:
        arrival = _Arrival(time.perf_counter_ns(), bool(self._mirror.requests))
        if self._exchange is not None:
            self._exchange.begin_step()
        steady, self._steady = self._steady, None
        if steady is not None and self._mirror.move_on(step):
            return ComputedStep(self._compute_steady(step.step_id, steady, arrival))
        scheduled = self._mirror.apply(step)
        before, self._launched = self._launched, None
        if not self._runs_ahead(scheduled):
            if before is not None:
                before.finish()
            return ComputedStep(self._compute(step, scheduled, arrival))
        self._pool.swap(step.swap_out, step.swap_in)
        self._pool.wake()
        inputs = pack_step(scheduled, self._device)
        tokens = self._sample_ahead(inputs)
        failpoint("worker.mid_step")
        sampling = inputs.sampling
        self._mirror.advance(scheduled, [~place for place in range(len(sampling))])
        end = partial(self._times.end, arrival)
        self._launched = _SampledStep(step.step_id, sampling, tokens, end)
        return self._launched

    def _runs_ahead(self, scheduled: Sequence[ScheduledRequest]) -> bool:
        """Whether the device alone can compute a step and choose its tokens."""
        if self._device_sampler is None or self._is_drafting or not scheduled:
            return False
        return not any(part.request.needs_host for part in scheduled)

    def _sample_ahead(self, inputs: StepInputs) -> "TokenCopy":
        sampler = self._device_sampler
        assert sampler is not None
        if self._graphs is None or self._graphs.compute(inputs) is None:
            sampler.feed(inputs.input_ids)
            vocab_size = self.facts.vocab_size
            sampler.sample(compute_logits(self._model, self._backend, inputs, vocab_size), inputs)
        num_tokens = len(inputs.sampling)
        if self._exchange is not None and self._exchange.group is not None:
            self._exchange.group.mark_differences(sampler.chosen[:num_tokens])
        return sampler.copy(num_tokens)

    def _compute(
        self, step: SchedulerOutput, scheduled: list[ScheduledRequest], arrival: _Arrival
    ) -> ModelRunnerOutput:
        """Compute a step whose tokens are needed on the host."""
        if self._draft_model is not None:
            self._draft_model.follow(step)
        self._pool.swap(step.swap_out, step.swap_in)
        if self._states is not None:
            self._states.swap(self._mirror.state_swap_out, step.state_swap_in)
        if not scheduled:
            return ModelRunnerOutput(step.step_id, [])
        self._pool.wake()
        inputs = pack_step(scheduled, self._device)
        if self._has_token_types:
            inputs = with_token_types(inputs)
        if self._adapters is not None:
            self._adapters.begin_step(inputs)
        masks = self._begin_masks(inputs) if self._mirror.num_constrained else None
        pooling = self._mirror.pooling
        with captured_hidden_states(self._model if pooling else None) as hidden:
            logits = self._compute_logits(inputs)
        failpoint("worker.mid_step")
        row_masks = None if masks is None else masks.result()
        token_ids, num_tokens, logprobs, errors = self._sample(inputs, logits, row_masks)
        pooled: dict[int, bytes] = {}
        if pooling:
            rows = inputs.first_rows
            pooled, not_finite = pool(scheduled, rows, pooling, hidden.rows, self._head)
            errors |= dict.fromkeys(not_finite, NOT_FINITE)
        self._agree(token_ids)
        if not self._is_drafting:
            self._publish(token_ids)
        prompt_logprobs = self._prompt_logprobs(inputs, logits)
        self._mirror.advance(scheduled, token_ids, num_tokens)
        if masks is not None:
            errors |= follow(scheduled)
        sampled_ns = time.perf_counter_ns()
        drafts = self._draft(scheduled) if self._is_drafting else []
        if self._is_drafting and self._stage is not None:
            self._publish(_packed_results(inputs.sampling, token_ids, num_tokens))
        if self._can_go_on(inputs):
            self._steady = SteadyDecode(inputs, self.facts.block_size)
        draft_ns = time.perf_counter_ns() - sampled_ns if self._is_drafting else 0
        forward_ns, wait_ns = self._times.end(arrival)
        return ModelRunnerOutput(
            step.step_id,
            token_ids,
            num_tokens,
            drafts,
            logprobs,
            prompt_logprobs,
            forward_ns,
            errors,
            pooled,
            draft_ns,
            wait_ns,
        )

    def _can_go_on(self, inputs: StepInputs) -> bool:
        """Return whether the inputs of the next step may be made from those of this one."""
        if self._device.type != "cpu" or self._is_drafting:
            return False
        if self._mirror.num_constrained or self._mirror.pooling or not self.facts.generates:
            return False
        return SteadyDecode.can_follow(inputs, len(self._mirror.requests))

    def _compute_steady(
        self, step_id: int, steady: SteadyDecode, arrival: _Arrival
    ) -> ModelRunnerOutput:
        """Compute a step of the same requests as the one before, one token further."""
        inputs = steady.move_on()
        logits = self._compute_logits(inputs)
        failpoint("worker.mid_step")
        sampled = self._sample_rows(steady.requests, logits, None)
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
        """Compare a step's tokens with those of other ranks."""
        if self._exchange is not None:
            self._exchange.agree(token_ids)

    def _publish(self, words: Sequence[int]) -> None:
        """Pass a step's tokens to other stages."""
        if self._stage is not None:
            self._stage.pipe.publish(words)

    def _compute_logits(self, inputs: StepInputs) -> torch.Tensor:
        if self._stage is not None:
            vocab_size = self.facts.vocab_size
            return self._stage.compute_logits(self._model, self._backend, inputs, vocab_size)
        if self._graphs is not None and not self._mirror.pooling:
            logits = self._graphs.compute(inputs)
            if logits is not None:
                return logits
        return compute_logits(self._model, self._backend, inputs, self.facts.vocab_size)

    def _begin_masks(self, inputs: StepInputs) -> Future[RowMasks] | None:
        """Start to compute the masks of the rows that `_sample` makes, beside the model."""
        requests = []
        row = 0
        for part in inputs.sampling:
            request, num_drafts = part.request, part.num_drafts
            if request.sampling_params.grammar is not None:
                state = grammar_state_of(request, self.grammars)
                drafts = request.draft_token_ids[:num_drafts]
                requests.append(MaskedRows(row, state, drafts))
            row += 1 + num_drafts
        if not requests:
            return None
        if self._mask_computer is None:
            assert self.grammars is not None
            num_threads = min(_MAX_MASK_THREADS, available_cpus())
            self._mask_computer = MaskComputer(
                num_threads, self.grammars.num_tokens, self.facts.vocab_size
            )
        return self._mask_computer.begin(requests)

    def _sample(self, inputs: StepInputs, logits: torch.Tensor, masks: RowMasks | None) -> _Sampled:
        if not inputs.sampling:
            return _Sampled([], [], {}, {})
        if not self.facts.generates:  # `logits` are hidden states
            return _Sampled([0] * len(inputs.sampling), [], {}, {})
        rows = rows_to_sample(inputs.sampling)
        if len(rows) == len(inputs.sampling):
            return self._sample_rows(rows, logits, masks)
        return self._sample_rows(rows, logits, masks, inputs.sampling)

    def _sample_rows(
        self,
        rows: Sequence[MirroredRequest | DraftedRow],
        logits: torch.Tensor,
        masks: RowMasks | None,
        drafted: Sequence[ScheduledRequest] = (),
    ) -> _Sampled:
        """Sample a token of each row, and drop those behind a wrong draft of some parts."""
        sampled = self._sampler.sample(logits[: len(rows)], rows, masks)
        token_ids, counts = sampled.token_ids, list[int]()
        valid: Sequence[int] = range(len(rows))
        if drafted:
            counts, valid = count_valid(drafted, token_ids)
            token_ids = [token_ids[row] for row in valid]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for row in valid if any(sampled.logprobs) else ():
            if (entry := sampled.logprobs[row]) is not None:
                logprobs.setdefault(rows[row].req_id, []).append(entry)
        lost = set(sampled.not_finite).intersection(valid)
        return _Sampled(token_ids, counts, logprobs, {rows[row].req_id: NOT_FINITE for row in lost})

    def _draft(self, scheduled: list[ScheduledRequest]) -> list[int]:
        """Make drafts for each request that sampled; returns their numbers, or [] if all are 0."""
        if self._draft_model is not None:
            self._draft_model.propose(scheduled)
        elif self._shared_drafts is None:
            propose_repetitions(scheduled)
        if self._shared_drafts is not None:
            self._shared_drafts.share(scheduled)
        self._limit_draft_states()
        counts = []
        for part in scheduled:
            if part.samples:
                request = part.request
                drafts = request.draft_token_ids
                if request.grammar_state is not None and request.draft_limit:
                    drafts = request.grammar_state.drafts(request.draft_limit, drafts)
                counts.append(self._mirror.take_drafts(request, drafts))
        return counts if any(counts) else []

    def _limit_draft_states(self) -> None:
        """Use no more draft states than the rank with the fewest has."""
        if self._states is None or self._has_limited_states:
            return
        if self._stage is not None:
            self._mirror.limit_draft_states(self._stage.pipe.least_draft_states)
        elif self._exchange is not None:
            self._mirror.limit_draft_states(self._exchange.least(self._num_draft_states))
        self._has_limited_states = True

    def _prompt_logprobs(self, inputs: StepInputs, logits: torch.Tensor) -> list[PromptLogprobs]:
        found = []
        for part, first_row, num_rows in inputs.prompt_rows:
            num_top = part.request.sampling_params.prompt_logprobs
            assert num_top is not None
            first = part.start + 1
            entries = self._sampler.prompt_logprobs(
                logits[first_row : first_row + num_rows],
                part.request.token_ids[first : first + num_rows],
                num_top,
            )
            found.append(PromptLogprobs(part.request.req_id, first, entries))
        return found


def _packed_results(
    parts: Sequence[ScheduledRequest], token_ids: Sequence[int], num_tokens: Sequence[int]
) -> list[int]:
    """Return the results of a step for the other stages: its tokens, and the drafts after them."""
    results: list[RequestResult] = []
    first = 0
    for part, count in zip(parts, num_tokens or [1] * len(parts), strict=True):
        tokens = list(token_ids[first : first + count])
        results.append(RequestResult(tokens, part.request.draft_token_ids))
        first += count
    return pack_results(results)
