"""The grants of one step, while the scheduler builds it."""

from collections.abc import Sequence

from core_proc.kv.swap import StepCopies
from core_proc.kv.tables import Tables
from core_proc.request import Request
from core_proc.scheduling.answer_size import (
    MAX_ANSWER_BYTES,
    MAX_ROW_BYTES,
    SCORED_TOKEN_BYTES,
    VECTOR_BYTES,
    row_bytes,
    sampled_row_bytes,
)
from protocol.core_worker import CachedRequestData, NewRequestData, SchedulerOutput
from protocol.message import pack_token_ids

_MAX_NEW_IDS = 1_500_000
"""Ids of tokens and blocks in the data of a step's new requests. An id takes at most 5 bytes, so
they fill half a frame; the other half is left for data of requests that the worker knows. The first
new request of a step may exceed this bound by its sampling parameters, which take at most 3 MB, and
by its copies from the host, which take at most 1.3 MB."""
_USUAL_PARAMS_IDS = 4096
"""Size of sampling parameters and numbers, in ids, with which the longest request is in bounds."""
_MAX_SCORED_TOKENS = 16_384
"""Tokens of requests with prompt logprobs in one step: 5 MB of the answer at most."""
_MAX_POOLED = 128
"""Vectors in the answer to one step: half a frame at most; fewer alongside log-probabilities."""
_NONE_GROWN = CachedRequestData()
"""The growth of every step in which no table grows; never changed."""


def longest_sequence(block_size: int, num_groups: int = 1) -> int:
    """Return the length of the longest request that a step can introduce, in tokens."""
    return (_MAX_NEW_IDS - _USUAL_PARAMS_IDS - num_groups) * block_size // (block_size + num_groups)


class ScheduledStep:
    """The budget of one step, and the grants from it."""

    __slots__ = (
        *("_answer_left", "_new_ids_left", "_row_bytes_left", "_scored_left", "_total", "budget"),
        *("granted", "grown", "new_reqs", "num_behind", "num_pooled", "num_prompt_tokens"),
        *("prompt_left", "ran_out_of_blocks", "sampling", "threshold"),
    )

    def __init__(self, budget: int, threshold: int, num_row_bytes: int = 0) -> None:
        """`num_row_bytes` is the sum of `row_bytes` over the running requests."""
        self._total = budget
        self.budget = budget
        self.threshold = threshold
        """Maximum number of tokens for one request; 0: no limit."""
        self.sampling: list[Request] = []
        """Requests that reach the end of their tokens, and so sample one, in mirror order."""
        self.granted: dict[int, int] = {}
        """Tokens by request id; a request missing here is in `sampling` and has one token."""
        self.grown: dict[int, Tables] = {}
        """New blocks of requests that the worker knows, by request id."""
        self.new_reqs: list[NewRequestData] = []
        self.num_pooled = 0
        """Number of requests in `sampling` that return a vector."""
        self.ran_out_of_blocks = False
        """True if a request was preempted for lack of blocks; then none is admitted."""
        self.prompt_left: int | None = None
        """Prompt tokens that may still be granted; None: no limit."""
        self.num_prompt_tokens = 0
        self.num_behind = 0
        """Number of running requests after the one that is being visited."""
        self._new_ids_left = _MAX_NEW_IDS
        self._scored_left = _MAX_SCORED_TOKENS
        self._row_bytes_left = MAX_ROW_BYTES - num_row_bytes
        self._answer_left = MAX_ANSWER_BYTES - num_row_bytes

    @property
    def num_tokens(self) -> int:
        return self._total - self.budget

    def extend(self, num_tokens: int) -> None:
        """Enlarge the step, and remove the threshold."""
        self._total += num_tokens
        self.budget += num_tokens
        self.threshold = 0

    def limit(self, request: Request, num_tokens: int) -> int:
        """Limit the tokens left to the threshold, and to the capacity of the answer's frame.

        Returns 0 if the request's vector would be one too many in the answer.
        """
        params, num_left = request.sampling_params, num_tokens
        if self.threshold:
            num_tokens = min(num_tokens, self.threshold)
        if params.prompt_logprobs is not None:
            num_scored = min(self._scored_left, self._answer_left // SCORED_TOKEN_BYTES)
            num_tokens = min(num_tokens, max(num_scored, 1))
        if params.pooling is not None and not self._has_room_for_vector:
            num_tokens = min(num_tokens, num_left - 1)
        return num_tokens

    @property
    def _has_room_for_vector(self) -> bool:
        return self.num_pooled < _MAX_POOLED and self._answer_left >= VECTOR_BYTES

    def limit_drafts(self, request: Request, num_drafts: int) -> int:
        """Limit drafts so that the answer has room for the log-probabilities of all of them."""
        size = sampled_row_bytes(request.sampling_params)
        return num_drafts if size == 0 else max(0, min(num_drafts, self._answer_left // size))

    def limit_prompt(self, num_tokens: int) -> int:
        """Limit prompt tokens to the time that decoding requests leave."""
        return num_tokens if self.prompt_left is None else min(num_tokens, self.prompt_left)

    def grant_prompt(self, num_tokens: int) -> None:
        """Record that granted tokens belong to a prompt, or are recomputed like one."""
        self.num_prompt_tokens += num_tokens
        if self.prompt_left is not None:
            self.prompt_left -= num_tokens

    def can_introduce(self, request: Request, num_blocks: int) -> bool:
        """Return whether the message has room for a new request with `num_blocks` in its tables.

        It always has room for one, if the answer to the step has room for its log-probabilities.
        """
        size = row_bytes(request.sampling_params)
        if size and size > min(self._row_bytes_left, self._answer_left):
            return False
        return not self.new_reqs or _num_ids(request, num_blocks) <= self._new_ids_left

    def advance(self, requests: list[Request]) -> int:
        """Grant one token to each request, in order, while the budget lasts; return the number."""
        number = len(requests)
        if number > self.budget:
            number = self.budget
            requests = requests[:number]
        for request in requests:
            request.num_computed_tokens += 1
        self.sampling += requests
        self.budget -= number
        return number

    def introduce(self, request: Request, num_computed_tokens: int, num_cached_tokens: int) -> None:
        """Add all data of a request that the worker does not know."""
        self._new_ids_left -= _num_ids(request, sum(map(len, request.block_tables)))
        size = row_bytes(request.sampling_params)
        self._row_bytes_left -= size
        self._answer_left -= size
        self.new_reqs.append(
            NewRequestData(
                req_id=request.req_id,
                token_ids=pack_token_ids(request.token_ids),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=request.sampling_params,
                block_ids=[table.copy() for table in request.block_tables],
                num_computed_tokens=num_computed_tokens,
                num_cached_tokens=num_cached_tokens,
                adapter_id=request.adapter_id,
            )
        )

    def undo_introduce(self, request: Request) -> bool:
        """Undo `introduce`; return whether the request had been introduced in this step."""
        before = len(self.new_reqs)
        self.new_reqs = [new for new in self.new_reqs if new.req_id != request.req_id]
        return len(self.new_reqs) < before

    def grant(self, request: Request, num_tokens: int) -> None:
        """Grant tokens, possibly in addition to earlier ones of the same request."""
        self.budget -= num_tokens
        if request.sampling_params.prompt_logprobs is not None:
            self._scored_left -= num_tokens
            self._answer_left -= num_tokens * SCORED_TOKEN_BYTES
        self.granted[request.req_id] = self.granted.get(request.req_id, 0) + num_tokens

    def add_sampling(self, request: Request, num_drafts: int) -> None:
        """Record that a request samples, with room for a vector, or for drafts that are right."""
        self.sampling.append(request)
        if request.sampling_params.pooling is not None:
            self.num_pooled += 1
            self._answer_left -= VECTOR_BYTES
        if num_drafts:
            self._answer_left -= num_drafts * sampled_row_bytes(request.sampling_params)

    def num_granted_to(self, requests: Sequence[Request]) -> int:
        sampling = set(self.sampling)
        return sum(self.granted.get(r.req_id, int(r in sampling)) for r in requests)

    def add_blocks(self, request: Request, new_blocks: Tables) -> None:
        before = self.grown.get(request.req_id)
        if before is not None:
            new_blocks = [old + new for old, new in zip(before, new_blocks, strict=True)]
        self.grown[request.req_id] = new_blocks

    def put_states(self, requests: Sequence[Request]) -> None:
        """Update state tables that have changed since they were added to the step.

        An entry that the worker knows from an earlier step holds the same block as before.
        """
        if not requests:
            return
        new = {new.req_id: new.block_ids[-1] for new in self.new_reqs}
        for request in requests:
            table = request.block_tables[-1]
            introduced = new.get(request.req_id, [])
            introduced[:] = table[: len(introduced)]
            appended = self.grown.get(request.req_id, [[]])[-1]
            appended[:] = table[len(table) - len(appended) :]

    def withdraw(self, request: Request) -> int:
        """Undo a grant, which still counts in the request's computed tokens; return its tokens."""
        num_tokens = self.num_granted_to([request])
        if request.num_tokens - (request.num_computed_tokens - num_tokens) > 1:
            self.grant_prompt(-num_tokens)
        self.granted.pop(request.req_id, None)
        if request in self.sampling:
            self.sampling.remove(request)
            if request.sampling_params.pooling is not None:
                self.num_pooled -= 1
                self._answer_left += VECTOR_BYTES
        self.grown.pop(request.req_id, None)
        self.budget += num_tokens
        if request.sampling_params.prompt_logprobs is not None:
            self._scored_left += num_tokens
            self._answer_left += num_tokens * SCORED_TOKEN_BYTES
        return num_tokens

    def message(
        self,
        step_id: int,
        preempted_req_ids: list[int],
        finished_req_ids: list[int],
        copies: tuple[StepCopies, StepCopies],
        draft_limits: dict[int, int],
    ) -> SchedulerOutput:
        """Build the message, which omits requests that get one token and no block."""
        kv, states = copies
        grown = self.grown
        return SchedulerOutput(
            step_id=step_id,
            scheduled_new_reqs=self.new_reqs,
            scheduled_cached_reqs=(
                CachedRequestData(list(grown), list(grown.values())) if grown else _NONE_GROWN
            ),
            num_scheduled_tokens={req_id: n for req_id, n in self.granted.items() if n != 1},
            total_num_scheduled_tokens=self.num_tokens,
            preempted_req_ids=preempted_req_ids,
            finished_req_ids=finished_req_ids,
            swap_out=kv.out,
            swap_in=kv.into,
            draft_limits=draft_limits,
            state_swap_out=states.out,
            state_swap_in=states.into,
        )


def _num_ids(request: Request, num_blocks: int) -> int:
    """Return an upper bound for the size of a new request's data, in ids."""
    params = request.sampling_params
    num_params = 64 + len(params.stop_token_ids) + 3 * len(params.logit_bias)
    num_params += len(params.allowed_token_ids or ()) + len(params.logprob_token_ids)
    num_params += sum(1 + len(word) for word in params.bad_words)
    if params.grammar is not None:  # a character has at most 4 bytes
        num_params += len(params.grammar.source)
    if (thinking := params.thinking_budget) is not None:
        num_params += len(thinking.begin_token_ids) + len(thinking.end_token_ids)
        num_params += len(thinking.call_token_ids) + len(thinking.space_token_ids)
    if request.swapped_out is not None:  # each copy has the ids of both blocks
        num_blocks += 2 * sum(map(len, request.swapped_out.host_tables))
    return request.num_tokens + num_blocks + num_params
