"""Chooses the request to preempt when blocks run out, and whether its KV is swapped out."""

from collections.abc import Sequence

from core_proc.kv.kv_cache import KVCacheManager
from core_proc.kv.swap import Swapper
from core_proc.options import SchedulerOptions
from core_proc.policy import Key, Policy
from core_proc.request import Request


class VictimChoice:
    """Chooses by the policy's key or, among the least important requests, by the cost of the loss.

    The cost of a preemption is the number of tokens to recompute. It grows with every token, so the
    request that has advanced furthest is not preempted. Sharing can lower the cost again. A request
    that was preempted often is therefore spared, until only such requests are left and the policy
    decides.
    """

    MAX_CHEAP_PREEMPTIONS = 8

    def __init__(
        self, options: SchedulerOptions, policy: Policy, kv: KVCacheManager, swapper: Swapper
    ) -> None:
        self._policy = policy
        self._kv = kv
        self._swapper = swapper
        self._key = policy.victim if options.victim_choice == "policy" else self._cheapness

    def choose(self, running: Sequence[Request]) -> Request:
        """Return the victim among all running requests (at least one)."""
        return max(running, key=self._key)

    def less_important(self, request: Request, running: Sequence[Request]) -> list[Request]:
        """Return the running requests that are less important than a waiting request."""
        rank = self._policy.rank(request)
        return [other for other in running if self._policy.rank(other) > rank]

    def is_swapped(self, victim: Request) -> bool:
        """Return whether the victim's KV will be copied instead of recomputed.

        A request for a vector is recomputed: the sum of its mean is lost with the preemption.
        """
        if victim.sampling_params.pooling is not None:
            return False
        return self._swapper.prefers(victim, self._num_lost_tokens(victim))

    def _num_lost_tokens(self, victim: Request) -> int:
        """Return how many computed tokens would be recomputed: see `num_lasting_blocks`."""
        num_lasting = self._kv.num_lasting_blocks(victim)
        return max(0, victim.num_computed_tokens - num_lasting * self._kv.block_size)

    def _cheapness(self, request: Request) -> Key:
        cost = float(self._num_lost_tokens(request))
        if request.num_preemptions >= self.MAX_CHEAP_PREEMPTIONS:
            cost = float("inf")
        return (self._policy.rank(request), -cost, *self._policy.victim(request))
