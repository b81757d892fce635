"""Speculative decoding as the scheduler sees it: several tokens of a request in one step.

After each step the worker says how many tokens it can guess ahead (drafts). The next step is
granted these too, computes all of them at once and keeps those that agree with what it samples; so
a step brings one token, and one more for each draft that was right. Positions whose drafts were
wrong do not count as computed. While drafts are on, a request sits out until its tokens are known:
how far it has come is not known before.
"""

from core_proc.kv_cache import KVCacheManager
from core_proc.options import SchedulerOptions
from core_proc.request import Request


class Speculation:
    """Grants drafts, takes back wrong ones, and counts."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.is_on = options.num_speculative_tokens > 0
        self.num_verifications = 0
        """Times that drafts of a request were verified."""
        self.num_draft_tokens = 0
        self.num_accepted_tokens = 0
        """Of them."""
        self.accepted_per_position = [0] * options.num_speculative_tokens
        """How often the first, second, ... draft was right."""

    def num_drafts(self, request: Request, kv: KVCacheManager, room: int) -> int:
        """Drafts worth verifying beside the one known token that is left to compute.

        Not more than `room`, so that whoever runs behind gets a token; none that could only be cut
        at the request's end; and none at all where there are no blocks for them: nobody is
        preempted for guesses.
        """
        left = request.max_num_tokens - request.num_tokens - 1
        num_drafts = min(request.num_draft_tokens, left, room)
        if not kv.has_room(request, request.num_tokens + num_drafts):
            return 0
        return max(0, num_drafts)

    def granted(self, request: Request, num_drafts: int) -> None:
        """The step that is being put together verifies so many; the others are dropped."""
        request.num_drafts_in_flight = num_drafts
        request.num_draft_tokens = 0

    def verified(self, request: Request, num_sampled: int, num_draft_tokens: int) -> None:
        """A running request has got its tokens, and the worker has guessed new ones."""
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
    """A request leaves the worker: what is verified for it in flight counts no more as computed.

    Right drafts still come as late tokens; their KV is not relied on.
    """
    request.num_computed_tokens -= request.num_drafts_in_flight
    request.num_drafts_in_flight = 0
    request.num_draft_tokens = 0
