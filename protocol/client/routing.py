"""The choice of a replica for a request: a pure function of what is known about the replicas.

A request costs its replica the tokens that are computed before its first output: those of the
requests before it, and those of its own prompt that are not cached. `prefix_aware` takes the
replica where the sum is smallest, so that a cached prefix counts as much as the same number of
waiting tokens. Few replicas are compared, however many there are: some of those that have the
longest prefix, and two drawn at random. Two random choices spread requests almost as well as a
comparison of all. Besides, several API processes, which do not know each other's requests, then do
not all choose the same replica.
"""

import random
from collections.abc import Callable, Sequence
from typing import NamedTuple

from protocol.config import RoutingPolicy

OPEN_REQUEST_TOKENS = 16
"""What an open request counts beside its prompt: it takes part in all steps until it ends."""
OTHER_REQUEST_TOKENS = 128
"""What a request of another client counts, whose prompt is not known here."""
_NUM_DRAWN = 2
_MOST_HOLDERS = 4


class Load(NamedTuple):
    """What a replica has to do, as far as one client knows."""

    num_open_requests: int
    """Of this client."""
    num_unstarted_tokens: int
    """Of the prompts of these requests that have no output yet."""
    num_other_requests: int
    """Running and waiting requests of other clients, as of the last status."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed before those of a new request, or beside them."""
        own = self.num_unstarted_tokens + self.num_open_requests * OPEN_REQUEST_TOKENS
        return own + self.num_other_requests * OTHER_REQUEST_TOKENS


class CachedPrefix(NamedTuple):
    """The longest prefix of a prompt that is known to be cached, and the replicas that have it."""

    num_tokens: int = 0
    holders: Sequence[int] = ()


def choose(
    policy: RoutingPolicy,
    serving: Sequence[int],
    load_of: Callable[[int], Load],
    cached: CachedPrefix,
    rng: random.Random,
) -> int:
    """Return the replica for a request, one of those that serve.

    `serving` begins with the one whose turn it is.
    """
    if policy is RoutingPolicy.ROUND_ROBIN:
        return serving[0]
    costs = {replica: load_of(replica).num_tokens for replica in _drawn(serving, _NUM_DRAWN, rng)}
    if policy is RoutingPolicy.PREFIX_AWARE:
        for replica in _drawn(cached.holders, _MOST_HOLDERS, rng):
            costs[replica] = load_of(replica).num_tokens - cached.num_tokens
    return min(costs, key=lambda replica: (costs[replica], replica))


def _drawn(replicas: Sequence[int], count: int, rng: random.Random) -> Sequence[int]:
    """Return some of the replicas, or all if there are no more."""
    return replicas if len(replicas) <= count else rng.sample(replicas, count)
