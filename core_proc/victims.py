"""Whom to preempt when memory runs out, and whether its KV is kept on the host meanwhile."""

from collections.abc import Sequence

from core_proc.kv_cache import KVCacheManager
from core_proc.options import SchedulerOptions
from core_proc.policy import Key, Policy
from core_proc.request import Request
from core_proc.swap import Swapper


class VictimChoice:
    """Chooses by the policy's key or, among the least important, by what the loss costs.

    The cost of a preemption is what must be computed again (or copied) for each block that it
    frees. The dearest request is never chosen while there is another, and it grows dearer with
    every token, so somebody always gets through.
    """

    def __init__(
        self, options: SchedulerOptions, policy: Policy, kv: KVCacheManager, swapper: Swapper
    ) -> None:
        self._policy = policy
        self._kv = kv
        self._swapper = swapper
        self._cost_tokens = options.swap_cost_tokens
        self._key = policy.victim if options.victim_choice == "policy" else self._cheapness

    def choose(self, running: Sequence[Request]) -> Request:
        """Return the victim among all that run (at least one)."""
        return max(running, key=self._key)

    def is_swapped(self, victim: Request) -> bool:
        """Whether the victim's KV shall be copied rather than computed again."""
        return self._swapper.prefers(victim, self._num_lost_tokens(victim))

    def _num_lost_tokens(self, victim: Request) -> int:
        """Computed tokens in blocks that nobody else keeps alive."""
        num_shared = self._kv.num_shared_blocks(victim)
        return max(0, victim.num_computed_tokens - num_shared * self._kv.block_size)

    def _cheapness(self, request: Request) -> Key:
        num_freed = self._kv.num_blocks_held(request)
        if num_freed == 0:
            return (self._policy.rank(request), float("-inf"))
        num_lost: float = self._num_lost_tokens(request)
        if self._swapper.prefers(request, self._num_lost_tokens(request)):
            num_lost = num_freed * self._cost_tokens
        return (self._policy.rank(request), -num_lost / num_freed, *self._policy.victim(request))
