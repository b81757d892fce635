"""The scheduler's part of speculative decoding: several tokens of a request in one step.

After each step the worker reports how many tokens it has guessed (drafts). The next step grants
these too, computes all of them at once, and keeps those that agree with its samples. A step brings
one token, and one more for each right draft. Positions whose drafts were wrong do not count as
computed. A request with drafts is not scheduled again until its tokens are known, because its
length is not known before; one without drafts is scheduled ahead of its tokens as always.
"""

from collections import deque
from collections.abc import Sequence

from core_proc.kv.kv_cache import KVCacheManager
from core_proc.options import SchedulerOptions
from core_proc.request import Request, RequestStatus
from core_proc.scheduling.draft_limits import DraftLimits, StepKind
from protocol.core_worker import ModelRunnerOutput


class Speculation:
    """Grants drafts, withdraws wrong ones, and counts both."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.is_on = options.num_speculative_tokens > 0
        self.limits = DraftLimits(options)
        self.num_verifications = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.accepted_per_position = [0] * options.num_speculative_tokens
        self._with_drafts: set[Request] = set()
        """Running requests with drafts to verify, or in flight."""
        self._granted: dict[Request, int] = {}
        """Number of drafts by request, in the step that is being built."""
        self._steps: deque[StepKind] = deque()
        """The steps in flight."""
        self._num_right = 0

    # A step -------------------------------------------------------------------------------------

    def holds_back(self, num_running: int) -> bool:
        """Return whether most requests would be left out, waiting for the step in flight."""
        return 2 * len(self._with_drafts) > num_running and not self.limits.is_measuring

    def must_wait(self, request: Request) -> bool:
        """Return whether a running request waits until its tokens are known."""
        if request.num_drafts_in_flight:
            return True
        return request.num_draft_tokens > 0 and not self.limits.is_measuring

    def is_quiet(self, request: Request) -> bool:
        """Return whether the request decodes like one without speculation."""
        return request not in self._with_drafts

    def num_drafts(self, request: Request, kv: KVCacheManager, room: int) -> int:
        """Return how many drafts to verify in addition to the one known token left to compute.

        Returns 0 if there are no blocks for them, since no request is preempted for a guess. No
        draft is verified that would be cut at the request's end, or after the position at which a
        state must be that of known tokens. There are at most `room` drafts, so that the following
        requests get a token.
        """
        if self.limits.is_measuring:
            return 0
        left = request.max_num_tokens - request.num_tokens - 1
        num_drafts = min(request.num_draft_tokens, left, room)
        if kv.states is not None:
            num_drafts = min(num_drafts, kv.states.end_of_drafts(request) - request.num_tokens)
        if not kv.has_room(request, request.num_tokens + num_drafts):
            return 0
        return max(0, num_drafts)

    def granted(self, request: Request, num_drafts: int) -> None:
        """Record that the current step verifies `num_drafts`; the others are dropped."""
        request.num_drafts_in_flight = num_drafts
        request.num_draft_tokens = 0
        if num_drafts:
            self._granted[request] = num_drafts
            self._with_drafts.add(request)
        else:
            self._with_drafts.discard(request)

    def sent(self, num_tokens: int, sampling: Sequence[Request]) -> dict[int, int]:
        """Record that the step is sent; return the changed limits, which are sent with it."""
        if not self.is_on:
            return {}
        changed = {
            req_id: request.draft_limit
            for req_id, request in self.limits.changed.items()
            if request.status is RequestStatus.RUNNING
        }
        self.limits.changed.clear()
        counts = self._granted.values()
        self._steps.append(
            StepKind(num_tokens, len(sampling), sum(counts), len(counts), any(changed.values()))
        )
        self._granted.clear()
        return changed

    # Its results --------------------------------------------------------------------------------

    def verified(
        self, request: Request, num_sampled: int, num_draft_tokens: int, num_running: int
    ) -> None:
        """Count the tokens that a running request got, and withdraw its wrong drafts."""
        num_drafts, num_accepted = request.num_drafts_in_flight, num_sampled - 1
        request.num_drafts_in_flight = 0
        request.num_computed_tokens -= num_drafts - num_accepted
        if num_drafts:
            self._num_right += num_accepted
            self.num_verifications += 1
            self.num_draft_tokens += num_drafts
            self.num_accepted_tokens += num_accepted
            for position in range(num_accepted):
                self.accepted_per_position[position] += 1
            self.limits.verified(request, num_drafts, num_accepted, num_running)
        # The worker may have made more before it received the current limit.
        request.num_draft_tokens = min(num_draft_tokens, request.draft_limit)
        if request.num_draft_tokens:
            self._with_drafts.add(request)
        else:
            self._with_drafts.discard(request)

    def step_ended(self, output: ModelRunnerOutput) -> None:
        self.limits.step_ended(self._steps.popleft(), output, self._num_right)
        self._num_right = 0

    # Requests that leave the worker -------------------------------------------------------------

    def forget(self, request: Request) -> None:
        """Stop counting drafts in flight as computed, because the request leaves the worker.

        Right drafts still arrive as late tokens, but their KV is not used.
        """
        request.num_computed_tokens -= request.num_drafts_in_flight
        request.num_drafts_in_flight = 0
        request.num_draft_tokens = 0
        self.ended(request)

    def ended(self, request: Request) -> None:
        self._with_drafts.discard(request)
        self._granted.pop(request, None)

    def workers_lost(self) -> None:
        """Forget the steps in flight, which will never be answered."""
        self._steps.clear()

    @property
    def num_speculating(self) -> int:
        return len(self._with_drafts)

    def check_invariants(self, running: Sequence[Request]) -> None:
        assert self._with_drafts <= set(running)
        for request in running:
            has_drafts = request.num_draft_tokens > 0 or request.num_drafts_in_flight > 0
            assert has_drafts == (request in self._with_drafts)
