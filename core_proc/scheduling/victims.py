"""Which request is preempted when blocks run out, and whether its KV is copied to the host."""

from collections.abc import Sequence

from core_proc.kv.kv_cache import KVCacheManager
from core_proc.kv.swap import Swapper
from core_proc.options import SchedulerOptions
from core_proc.policy import Key, Policy
from core_proc.request import Request


class VictimChoice:
    """Chooses by the policy's key or, among the least important requests, by the cost of the loss.

    The cost of a preemption is what must be computed again. It grows with every token, so the
    request that is furthest is not preempted. Sharing can lower the cost again. So a request that
    was preempted often is spared, until only such requests are left and the policy decides.
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
        """Return the victim among all that run (at least one)."""
        return max(running, key=self._key)

    def less_important(self, request: Request, running: Sequence[Request]) -> list[Request]:
        """Return those that run although a waiting request is more important."""
        rank = self._policy.rank(request)
        return [other for other in running if self._policy.rank(other) > rank]

    def is_swapped(self, victim: Request) -> bool:
        """Whether the victim's KV is to be copied instead of computed again.

        A request for a vector is computed again: the sum of its mean is lost with the preemption.
        """
        if victim.sampling_params.pooling is not None:
            return False
        return self._swapper.prefers(victim, self._num_lost_tokens(victim))

    def _num_lost_tokens(self, victim: Request) -> int:
        """Count the computed tokens that would be computed again: see `num_lasting_blocks`."""
        num_lasting = self._kv.num_lasting_blocks(victim)
        return max(0, victim.num_computed_tokens - num_lasting * self._kv.block_size)

    def _cheapness(self, request: Request) -> Key:
        cost = float(self._num_lost_tokens(request))
        if request.num_preemptions >= self.MAX_CHEAP_PREEMPTIONS:
            cost = float("inf")
        return (self._policy.rank(request), -cost, *self._policy.victim(request))
