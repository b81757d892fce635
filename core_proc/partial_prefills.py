"""A limit on how many prompts are computed over several steps at the same time.

Without one, every long prompt that is admitted shares the step's tokens with all others, and all of
their first tokens come late.
"""

from core_proc.options import SchedulerOptions
from core_proc.request import Request


class PartialPrefills:
    """Running requests whose prompts are computed in part."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._most = options.max_num_partial_prefills
        self._most_long = options.max_long_partial_prefills
        self._threshold = options.long_prefill_token_threshold
        self.is_limited = self._most > 0 or self._most_long > 0
        """Whether there is any reason to count."""
        self._members: set[Request] = set()
        self._num_long = 0

    def is_long(self, request: Request) -> bool:
        """Whether the request falls under the limit on long ones: a matter of its prompt."""
        return self._most_long > 0 and request.num_prompt_tokens > self._threshold

    def follow(self, request: Request) -> None:
        """Count a running request, or not, according to how far it is computed now."""
        if request.num_computed_tokens >= request.num_tokens:
            self.drop(request)
        elif request not in self._members:
            self._members.add(request)
            self._num_long += self.is_long(request)

    def drop(self, request: Request) -> None:
        """Count a request no more."""
        if request in self._members:
            self._members.remove(request)
            self._num_long -= self.is_long(request)

    @property
    def has_room(self) -> bool:
        """Whether one more prompt may be begun and not finished in the same step."""
        return self._most == 0 or len(self._members) < self._most

    @property
    def has_room_for_long(self) -> bool:
        """Whether a long prompt may be begun."""
        return self._most_long == 0 or self._num_long < self._most_long

    def check_invariants(self, running: list[Request]) -> None:
        """Compare the books with the requests that run."""
        assert self._members <= set(running)
        assert all(r.num_computed_tokens < r.num_tokens for r in self._members)
        assert self._num_long == sum(map(self.is_long, self._members))
