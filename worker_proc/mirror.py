"""The worker's mirror of the running set: full data once, then only what changed.

It applies the rules of `protocol/core_worker.py` and checks every delta, so the first step that
contradicts the mirror raises an error. It holds no tensors, and every runner uses it.
"""

from array import array
from collections.abc import Container, Mapping, Sequence
from itertools import islice

from protocol.core_worker import NULL_BLOCK, BlockCopies, NewRequestData, SchedulerOutput
from protocol.message import unpack_token_ids
from protocol.model_facts import ModelFacts
from worker_proc.drafting.draft_states import DraftStates, state_after
from worker_proc.errors import MirrorError
from worker_proc.kv.step_bounds import StepBounds
from worker_proc.request import MirroredRequest, ScheduledRequest


class Mirror:
    """The running requests in admission order; every step is applied to them."""

    def __init__(
        self,
        facts: ModelFacts,
        num_speculative_tokens: int = 0,
        adapters: Container[int] | None = None,
        num_draft_states: int = 0,
    ) -> None:
        """`adapters` has the ids of the adapters that are currently loaded.

        `num_draft_states` is the number of state blocks, after those of the core, for the states
        before drafts.
        """
        self._facts = facts
        self._bounds = StepBounds(facts)
        self._has_states = facts.kv_groups[-1].is_state
        self._draft_states = DraftStates(facts.num_state_blocks, num_draft_states)
        self._adapters = () if adapters is None else adapters
        self._num_speculative_tokens = num_speculative_tokens
        self.requests: dict[int, MirroredRequest] = {}
        self.num_constrained = 0
        """Requests with a grammar."""
        self.pooling: set[int] = set()
        """The requests that return a vector."""
        self.highest_block = NULL_BLOCK
        """The highest KV block that a request has had."""
        self.state_swap_out = BlockCopies()
        """The copies of the last step from state blocks, which have the states to copy."""
        self._next_step_id: int | None = None

    def reset(self) -> None:
        """Forget every request; the next step may have any id."""
        self.requests.clear()
        self._draft_states.clear()
        self.num_constrained = 0
        self.pooling.clear()
        self._next_step_id = None

    def forget_blocks(self) -> None:
        """Forget which blocks were used, because their memory was released."""
        self.highest_block = NULL_BLOCK

    def apply(self, step: SchedulerOutput) -> list[ScheduledRequest]:
        """Apply a step and return what it computes, in mirror order; unusable after an error."""
        expected = self._next_step_id
        if expected is not None and step.step_id != expected:
            raise MirrorError(f"step_id {step.step_id} came instead of {expected}")
        self._next_step_id = step.step_id + 1
        self._take_copies(step, self._remove_left(step))
        for new in step.scheduled_new_reqs:
            self._append(new)
        self._grow_tables(step)
        self._take_draft_limits(step)
        return self._schedule(step)

    def _remove_left(self, step: SchedulerOutput) -> dict[int, int]:
        """Remove the requests that have left.

        Returns where the state of each preempted request is, by the last block of its table.
        """
        states: dict[int, int] = {}
        for field_name in ("preempted_req_ids", "finished_req_ids"):
            for req_id in getattr(step, field_name):
                left = self.requests.pop(req_id, None)
                if left is None:
                    raise MirrorError(f"{field_name} names {req_id}, which is not mirrored")
                self.num_constrained -= left.sampling_params.grammar is not None
                self.pooling.discard(req_id)
                if self._has_states and field_name == "preempted_req_ids":
                    own_block = left.block_tables[-1][-1]
                    states[own_block] = left.state_block or own_block
                self._draft_states.release(left)
        return states

    def _take_draft_limits(self, step: SchedulerOutput) -> None:
        for req_id, limit in step.draft_limits.items():
            if req_id not in self.requests:
                raise MirrorError(f"draft_limits names {req_id}, which is not mirrored")
            if limit > self._num_speculative_tokens:
                raise MirrorError(
                    f"draft_limits gives request {req_id} {limit} drafts,"
                    f" more than num_speculative_tokens {self._num_speculative_tokens}"
                )
            self.requests[req_id].draft_limit = limit

    def move_on(self, step: SchedulerOutput) -> bool:
        """Apply a step that computes one token of each request and adds at most new blocks.

        Returns False if the step was not applied, because it is of another kind or wrong.
        """
        others = (
            step.scheduled_new_reqs,
            step.preempted_req_ids,
            step.finished_req_ids,
            step.num_scheduled_tokens,
            step.draft_limits,
            step.swap_out.device_block_ids or step.swap_out.host_block_ids,
            step.swap_in.device_block_ids or step.swap_in.host_block_ids,
            step.state_swap_out.device_block_ids or step.state_swap_out.host_block_ids,
            step.state_swap_in.device_block_ids or step.state_swap_in.host_block_ids,
        )
        if any(others) or step.step_id != self._next_step_id:
            return False
        if step.total_num_scheduled_tokens != len(self.requests):
            return False
        self._next_step_id += 1
        self._grow_tables(step)
        return True

    def append(self, token_ids: Sequence[int]) -> None:
        """Count one computed token of each request, which sampled one of these tokens."""
        for request, token_id in zip(self.requests.values(), token_ids, strict=True):
            request.num_computed_tokens += 1
            request.token_ids.append(token_id)
            if request.edits is not None:
                request.edits.add((token_id,))

    def limit_draft_states(self, number: int) -> None:
        """Limit the blocks for states before drafts to the smallest number of any rank."""
        self._draft_states.max_used = number

    def take_drafts(self, request: MirroredRequest, drafts: list[int]) -> int:
        """Give a request the drafts for its next step; return how many it takes.

        With a state group, each draft that it takes needs a block for the state before it.
        """
        if self._has_states:
            drafts = drafts[: self._draft_states.reserve(request, len(drafts))]
        request.draft_token_ids = drafts
        return len(drafts)

    def advance(
        self,
        scheduled: list[ScheduledRequest],
        sampled_token_ids: list[int],
        num_sampled_tokens: Sequence[int] = (),
    ) -> None:
        """Count the tokens that `scheduled` computed, and append those that were sampled.

        `num_sampled_tokens` has for each sampling part one plus the number of right drafts; empty:
        one each.
        """
        tokens = iter(sampled_token_ids)
        for part in scheduled:
            request = part.request
            request.num_computed_tokens = part.start + part.num_tokens
            request.state_block = NULL_BLOCK
            if part.samples and not num_sampled_tokens:
                request.append((next(tokens),))
        if not num_sampled_tokens:
            if next(tokens, None) is not None:
                raise MirrorError("more tokens were sampled than requests sample")
            return
        self._append_verified(scheduled, sampled_token_ids, num_sampled_tokens)

    def _append_verified(
        self,
        scheduled: list[ScheduledRequest],
        sampled_token_ids: list[int],
        num_sampled_tokens: Sequence[int],
    ) -> None:
        """Append the sampled tokens of each part; wrong drafts no longer count as computed."""
        tokens = iter(sampled_token_ids)
        sampling = [part for part in scheduled if part.samples]
        if len(num_sampled_tokens) != len(sampling):
            raise MirrorError(
                f"{len(num_sampled_tokens)} requests sampled, and {len(sampling)} were scheduled to"
            )
        if sum(num_sampled_tokens) != len(sampled_token_ids):
            raise MirrorError(
                f"{len(sampled_token_ids)} tokens were sampled, in parts that add up to"
                f" {sum(num_sampled_tokens)}"
            )
        for part, num_sampled in zip(sampling, num_sampled_tokens, strict=True):
            request, num_drafts = part.request, part.num_drafts
            if not 1 <= num_sampled <= num_drafts + 1:
                raise MirrorError(
                    f"request {request.req_id} sampled {num_sampled} tokens"
                    f" over {num_drafts} drafts"
                )
            request.num_computed_tokens -= num_drafts + 1 - num_sampled
            if self._has_states:
                request.state_block = state_after(request, num_drafts, num_sampled - 1)
            request.append(tuple(islice(tokens, num_sampled)))

    def check_empty(self) -> None:
        """Raise a MirrorError if any request is mirrored: a sleep would lose its KV."""
        if self.requests:
            raise MirrorError(f"{len(self.requests)} requests are mirrored during a sleep")

    def _append(self, new: NewRequestData) -> None:
        name = f"new request {new.req_id}"
        if new.req_id in self.requests:
            raise MirrorError(f"{name} is mirrored already")
        token_ids = unpack_token_ids(new.token_ids)
        self._bounds.check_new(new, token_ids)
        if new.adapter_id and new.adapter_id not in self._adapters:
            raise MirrorError(f"{name} has adapter {new.adapter_id}, which is not loaded")
        self._record_use(new.block_ids)
        params = new.sampling_params
        self.num_constrained += params.grammar is not None
        if params.pooling is not None:
            self.pooling.add(new.req_id)
        self.requests[new.req_id] = MirroredRequest(
            req_id=new.req_id,
            token_ids=token_ids,
            num_prompt_tokens=new.num_prompt_tokens,
            sampling_params=params,
            block_tables=[array("i", table) for table in new.block_ids],
            num_computed_tokens=new.num_computed_tokens,
            num_cached_tokens=new.num_cached_tokens,
            adapter_id=new.adapter_id,
            draft_limit=0 if params.pooling is not None else self._num_speculative_tokens,
        )

    def _grow_tables(self, step: SchedulerOutput) -> None:
        cached = step.scheduled_cached_reqs
        if len(cached.req_ids) != len(cached.new_block_ids):
            raise MirrorError("columns of scheduled_cached_reqs differ in length")
        for req_id, columns in zip(cached.req_ids, cached.new_block_ids, strict=True):
            request = self.requests.get(req_id)
            if request is None:
                raise MirrorError(f"scheduled_cached_reqs names {req_id}, which is not mirrored")
            self._bounds.check_tables(req_id, columns, None)
            self._record_use(columns)
            for table, block_ids in zip(request.block_tables, columns, strict=True):
                table.extend(block_ids)

    def _record_use(self, tables: list[list[int]]) -> None:
        for table, group in zip(tables, self._facts.kv_groups, strict=True):
            if table and not group.is_state:
                self.highest_block = max(self.highest_block, *table)

    def _check_states(self, scheduled: list[ScheduledRequest]) -> None:
        """Check that each part has a state block to begin from, and one for its last state."""
        size = self._facts.block_size
        for part in scheduled:
            table = part.request.block_tables[-1]
            for position in (part.start, part.end):
                if position and table[(position - 1) // size] == NULL_BLOCK:
                    raise MirrorError(
                        f"request {part.request.req_id} has no block for its state after"
                        f" {position} tokens"
                    )

    def _take_copies(self, step: SchedulerOutput, states: Mapping[int, int]) -> None:
        """Check the copies of a step, and record the location of the states that it copies.

        `states` has the location of each preempted request's state, by the last block of its table.
        """
        for field_name in ("swap_out", "swap_in", "state_swap_out", "state_swap_in"):
            copies: BlockCopies = getattr(step, field_name)
            if copies.device_block_ids or copies.host_block_ids:
                self._bounds.check_copies(copies, field_name)
        out = step.state_swap_out
        for block_id in out.device_block_ids:
            if block_id not in states:
                raise MirrorError(f"state_swap_out names {block_id}, of no preempted request")
        sources = [states[block_id] for block_id in out.device_block_ids]
        self.state_swap_out = BlockCopies(sources, out.host_block_ids)

    def _schedule(self, step: SchedulerOutput) -> list[ScheduledRequest]:
        counts = step.num_scheduled_tokens
        if not counts.keys() <= self.requests.keys():
            unknown = min(counts.keys() - self.requests.keys())
            raise MirrorError(f"num_scheduled_tokens names {unknown}, which is not mirrored")
        scheduled: list[ScheduledRequest] = []
        total, block_size = 0, self._facts.block_size
        for req_id, request in self.requests.items():
            num_tokens = counts.get(req_id, 1) if counts else 1
            total += num_tokens
            if num_tokens == 1:  # most parts of most steps
                start, known = request.num_computed_tokens, len(request.token_ids)
                if start < known and start < len(request.block_tables[0]) * block_size:
                    scheduled.append(ScheduledRequest(request, start, 1, start + 1 == known))
                    continue
            if num_tokens:
                scheduled.append(self._part(request, num_tokens))
        if total != step.total_num_scheduled_tokens:
            raise MirrorError(
                f"total_num_scheduled_tokens is {step.total_num_scheduled_tokens},"
                f" and the mirror adds up to {total}"
            )
        if self._has_states:
            self._check_states(scheduled)
        return scheduled

    def _part(self, request: MirroredRequest, num_tokens: int) -> ScheduledRequest:
        start = request.num_computed_tokens
        end, known = start + num_tokens, len(request.token_ids)
        num_blocks, block_size = len(request.block_tables[0]), self._facts.block_size
        problem = ""
        if end > known:  # the part reaches over drafts
            num_drafts = len(request.draft_token_ids)
            if end > known + num_drafts:
                drafts = f" and {num_drafts} drafts" if num_drafts else ""
                problem = f" of {known} known tokens{drafts}"
            elif end > self._facts.max_model_len:
                problem = f", past max_model_len {self._facts.max_model_len}"
        if not problem and end > num_blocks * block_size:
            problem = f" with {num_blocks} blocks of {block_size} tokens"
        if problem:
            raise MirrorError(f"request {request.req_id} is scheduled to position {end}{problem}")
        return ScheduledRequest(request, start, num_tokens, end >= known)
