"""Limits the number of prompts that are computed over several steps at the same time.

Without a limit, all admitted long prompts share the tokens of each step, and all of their first
tokens are late.
"""

from core_proc.options import SchedulerOptions
from core_proc.request import Request


class PartialPrefills:
    """Running requests whose prompts are partially computed."""

    def __init__(self, options: SchedulerOptions) -> None:
        self._max_members = options.max_num_partial_prefills
        self._max_long = options.max_long_partial_prefills
        self._threshold = options.long_prefill_token_threshold
        is_adaptive = options.long_prefill_token_threshold_adaptive
        has_target = options.target_itl_ms > 0
        self.is_counted = self._max_members > 0 or self._max_long > 0 or is_adaptive or has_target
        self._members: set[Request] = set()
        self._num_long = 0

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def is_long(self, request: Request) -> bool:
        """Return whether the limit on long prompts applies to the request."""
        return self._max_long > 0 and request.num_prompt_tokens > self._threshold

    def follow(self, request: Request) -> None:
        """Count a running request while its prompt is partially computed."""
        if request.num_computed_tokens >= request.num_tokens:
            self.drop(request)
        elif request not in self._members:
            self._members.add(request)
            self._num_long += self.is_long(request)

    def drop(self, request: Request) -> None:
        if request in self._members:
            self._members.remove(request)
            self._num_long -= self.is_long(request)

    @property
    def has_room(self) -> bool:
        """True if another prompt may begin without ending in the same step."""
        return self._max_members == 0 or len(self._members) < self._max_members

    @property
    def has_room_for_long(self) -> bool:
        return self._max_long == 0 or self._num_long < self._max_long

    def check_invariants(self, running: list[Request]) -> None:
        assert self._members <= set(running)
        assert all(r.num_computed_tokens < r.num_tokens for r in self._members)
        assert self._num_long == sum(map(self.is_long, self._members))
