"""Speculative decoding as the scheduler sees it: several tokens of a request in one step.

After each step the worker reports how many tokens it has guessed (drafts). The next step grants
these too, computes all of them at once, and keeps those that agree with what it samples. So a step
brings one token, and one more for each right draft. Positions whose drafts were wrong do not count
as computed. A request sits out until its tokens are known, as its length is not known before.
"""

from core_proc.kv.kv_cache import KVCacheManager
from core_proc.options import SchedulerOptions
from core_proc.request import Request


class Speculation:
    """Grants drafts, withdraws wrong ones, and counts both."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.is_on = options.num_speculative_tokens > 0
        self.num_verifications = 0
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        self.accepted_per_position = [0] * options.num_speculative_tokens

    def num_drafts(self, request: Request, kv: KVCacheManager, room: int) -> int:
        """Return how many drafts to verify besides the one known token that is left to compute.

        None without blocks for them, as no request is preempted for a guess; none that could only
        be cut at the request's end; at most `room`, so that the requests behind get a token.
        """
        left = request.max_num_tokens - request.num_tokens - 1
        num_drafts = min(request.num_draft_tokens, left, room)
        if not kv.has_room(request, request.num_tokens + num_drafts):
            return 0
        return max(0, num_drafts)

    def granted(self, request: Request, num_drafts: int) -> None:
        """Note that the current step verifies `num_drafts`; the others are dropped."""
        request.num_drafts_in_flight = num_drafts
        request.num_draft_tokens = 0

    def verified(self, request: Request, num_sampled: int, num_draft_tokens: int) -> None:
        """Count the tokens that a running request got, and withdraw its wrong drafts."""
        num_drafts, num_accepted = request.num_drafts_in_flight, num_sampled - 1
        request.num_drafts_in_flight = 0
        request.num_draft_tokens = num_draft_tokens
        request.num_computed_tokens -= num_drafts - num_accepted
        if num_drafts:
            self.num_verifications += 1
            self.num_draft_tokens += num_drafts
            self.num_accepted_tokens += num_accepted
            for position in range(num_accepted):
                self.accepted_per_position[position] += 1


def forget_drafts(request: Request) -> None:
    """Stop counting drafts in flight as computed, because the request leaves the worker.

    Right drafts still arrive as late tokens; their KV is not relied on.
    """
    request.num_computed_tokens -= request.num_drafts_in_flight
    request.num_drafts_in_flight = 0
    request.num_draft_tokens = 0
