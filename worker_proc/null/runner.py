"""A runner without a model: the next token is a pure function of the context.

With it, real API, core and worker processes run in a test within milliseconds. It checks every
delta that it receives, and measures the control plane alone.
"""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from protocol.adapters import Adapter
from protocol.core_worker import ModelRunnerOutput, PromptLogprobs, SchedulerOutput, TokenLogprobs
from protocol.message import pack_token_ids
from protocol.model_facts import ModelFacts
from protocol.process.failpoints import POISON_TOKEN_ID, failpoint
from protocol.transport.runtime import Clock
from worker_proc.adapters.kept import KeptAdapters
from worker_proc.grammar.compiler import GrammarCompiler
from worker_proc.grammar.following import follow, grammar_state_of
from worker_proc.mirror import Mirror
from worker_proc.null.blocks import NullBlocks
from worker_proc.null.model import allows, draft_token_ids, next_token_id, null_vector
from worker_proc.null.state_memory import NullStateMemory
from worker_proc.null.states import NullStates
from worker_proc.offload.memory import NoMemory
from worker_proc.request import MirroredRequest, ScheduledRequest
from worker_proc.runner import ComputedStep
from worker_proc.sampling.thinking import forced_token
from worker_proc.sampling.verification import count_valid

_POISON = pack_token_ids([POISON_TOKEN_ID])


class NullTimes(NamedTuple):
    """The simulated times of a null runner; by default it is as fast as it can be."""

    step_s: float = 0.0
    """Seconds for each step."""
    token_s: float = 0.0
    """Seconds for each token, in addition."""
    swap_cost_tokens: float = 1.0
    """Cost of copying a block to the host and back, in prompt tokens computed in that time."""


class NullRunner:
    """Executes steps without a model, in microseconds."""

    attention = ""
    draft_blocks = None

    def __init__(
        self,
        facts: ModelFacts,
        times: NullTimes = NullTimes(),  # noqa: B008 - immutable
        *,
        num_speculative_tokens: int = 0,
        grammars: GrammarCompiler | None = None,
        adapters: KeptAdapters[Adapter] | None = None,
        num_draft_states: int | None = None,
        block_memory: NoMemory | None = None,
        clock: Clock = time,
    ) -> None:
        """`num_draft_states` of None stands for as many as drafts may need."""
        self.facts = facts
        self._times = times
        self.swap_cost_tokens = times.swap_cost_tokens
        self._num_speculative_tokens = num_speculative_tokens
        self.grammars = grammars
        self._clock = clock
        self.adapters = adapters
        self.block_memory = block_memory
        if num_draft_states is None:
            num_draft_states = num_speculative_tokens * facts.num_state_blocks
        self._mirror = Mirror(facts, num_speculative_tokens, adapters, num_draft_states)
        self._blocks = NullBlocks(facts, self._mirror.requests)
        has_states = facts.kv_groups[-1].is_state
        self._states = NullStates(facts.block_size) if has_states else None
        self.state_memory: NullStateMemory | None = None
        if self._states is not None and block_memory is not None:
            num_slots = block_memory.num_slots
            self.state_memory = NullStateMemory(self._states.blocks, num_slots)

    def on_wait(self, report: Callable[[], None]) -> None:
        pass

    def reset(self, epoch: int = 0) -> None:
        self._mirror.reset()
        self.sleep()

    def prepare_memory(self, *, is_idle: bool = True) -> bool:
        return False

    def leave(self) -> None:
        pass

    def sleep(self) -> None:
        self._mirror.check_empty()
        self._blocks.clear()
        if self._states is not None:
            self._states.clear()

    def launch(self, step: SchedulerOutput) -> ComputedStep:
        return ComputedStep(self.execute(step))

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Check the step and return its tokens; see `Runner`.

        Besides the mirror's rules, no step may write to a block that another request reads, copy
        from a host block that was never written, or begin from the state of other tokens.
        """
        began_ns = self._clock.monotonic_ns()
        scheduled = self._mirror.apply(step)
        for new in step.scheduled_new_reqs:
            failpoint("worker.poison", when=new.token_ids.startswith(_POISON))
        self._blocks.swap(step)
        self._blocks.write(scheduled)
        if self._states is not None:
            self._states.swap(self._mirror.state_swap_out, step.state_swap_in)
            self._states.execute(scheduled, step.preempted_req_ids + step.finished_req_ids)
        delay_s = self._times.step_s + self._times.token_s * step.total_num_scheduled_tokens
        if delay_s > 0:
            self._clock.sleep(delay_s)
        failpoint("worker.mid_step")
        sampling = [part for part in scheduled if part.samples]
        sampled, num_sampled, logprobs = self._sample(sampling)
        prompt_logprobs = [
            self._prompt_logprobs(part, num_top)
            for part in scheduled
            if (num_top := part.request.sampling_params.prompt_logprobs) is not None
            and part.start + 1 < part.request.num_prompt_tokens
        ]
        pooled = {
            part.request.req_id: null_vector(part.request, self.facts.embedding_size)
            for part in (sampling if self._mirror.pooling else ())
            if part.request.req_id in self._mirror.pooling
        }
        self._mirror.advance(scheduled, sampled, num_sampled)
        errors = follow(scheduled) if self._mirror.num_constrained else {}
        num_drafts = self._draft(scheduled) if self._num_speculative_tokens else []
        ns = self._clock.monotonic_ns() - began_ns
        return ModelRunnerOutput(
            step.step_id,
            sampled,
            num_sampled,
            num_drafts,
            logprobs,
            prompt_logprobs,
            ns,
            errors,
            pooled,
        )

    def _sample(
        self, sampling: Sequence[ScheduledRequest]
    ) -> tuple[list[int], list[int], dict[int, list[TokenLogprobs]]]:
        """Return tokens, how many of them each part has (empty: one), and their logprobs."""
        requests = [part.request for part in sampling]
        num_sampled: list[int] = []
        if self._num_speculative_tokens:
            rows = [token_id for part in sampling for token_id in self._sample_rows(part)]
            num_sampled, valid = count_valid(sampling, rows)
            sampled = [rows[row] for row in valid]
            pairs = zip(requests, num_sampled, strict=True)
            requests = [request for request, count in pairs for _ in range(count)]
        else:
            sampled = [self._sample_one(request) for request in requests]
        logprobs: dict[int, list[TokenLogprobs]] = {}
        for request, token_id in zip(requests, sampled, strict=True):
            if (num_top := request.sampling_params.logprobs) is not None:
                entries = logprobs.setdefault(request.req_id, [])
                entries.append(self._logprobs(token_id, num_top))
        return sampled, num_sampled, logprobs

    def _sample_rows(self, part: ScheduledRequest) -> list[int]:
        """Sample a row for the last known token and one for each draft, as a model would."""
        request, drafts = part.request, part.request.draft_token_ids[: part.num_drafts]
        known = request.num_tokens
        masks = self._masks(request, drafts)
        rows = [self._sample_masked(request, masks[0])]
        for draft, mask in zip(drafts, masks[1:], strict=True):
            request.token_ids.append(draft)
            rows.append(self._sample_masked(request, mask))
        del request.token_ids[known:]
        return rows

    def _sample_one(self, request: MirroredRequest) -> int:
        if not request.is_confined:
            return self._next_token_id(request)
        return self._sample_masked(request, self._masks(request, [])[0])

    def _sample_masked(self, request: MirroredRequest, mask: bytes | None) -> int:
        budget = request.sampling_params.thinking_budget
        if budget is not None:
            forced = forced_token(request.token_ids, request.num_prompt_tokens, budget)
            if forced is not None and (mask is None or allows(mask, forced)):
                return forced
        return self._next_token_id(request, mask)

    def _masks(self, request: MirroredRequest, drafts: list[int]) -> list[bytes | None]:
        """Return the mask of each row; None: every token is allowed."""
        masks: list[bytes | None] = []
        if request.sampling_params.grammar is not None:
            masks += grammar_state_of(request, self.grammars).masks(drafts)
        return masks + [None] * (1 + len(drafts) - len(masks))

    def _draft(self, scheduled: list[ScheduledRequest]) -> list[int]:
        """Make drafts for each request that sampled; returns their numbers, or [] if all are 0."""
        counts = []
        for part in scheduled:
            if part.samples:
                request = part.request
                drafts = self._guess(request)
                if request.grammar_state is not None:
                    drafts = request.grammar_state.drafts(request.draft_limit, drafts)
                counts.append(self._mirror.take_drafts(request, drafts))
        return counts if any(counts) else []

    def _guess(self, request: MirroredRequest) -> list[int]:
        facts = self.facts
        return draft_token_ids(
            request.token_ids, request.draft_limit, facts.vocab_size, facts.eos_token_ids
        )

    def _next_token_id(self, request: MirroredRequest, mask: bytes | None = None) -> int:
        facts = self.facts
        return next_token_id(
            request.token_ids,
            facts.vocab_size,
            facts.eos_token_ids,
            mask,
            request.adapter_id,
        )

    def _logprobs(self, token_id: int, num_top: int) -> TokenLogprobs:
        others = [i for i in range(min(num_top + 1, self.facts.vocab_size)) if i != token_id]
        top_ids = [token_id, *others][:num_top]
        return TokenLogprobs(token_id, 0.0, 1, top_ids, [-float(i) for i in range(len(top_ids))])

    def _prompt_logprobs(self, part: ScheduledRequest, num_top: int) -> PromptLogprobs:
        end = min(part.end + 1, part.request.num_prompt_tokens)
        token_ids = part.request.token_ids[part.start + 1 : end]
        entries = [self._logprobs(token_id, num_top) for token_id in token_ids]
        return PromptLogprobs(part.request.req_id, part.start + 1, entries)
