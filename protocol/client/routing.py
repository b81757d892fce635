"""Chooses a replica for a request.

The cost of a request at a replica is the number of tokens computed before its first output: those
of earlier requests, and the uncached tokens of its own prompt. `prefix_aware` chooses the replica
with the smallest sum, so that a cached token counts as much as a waiting one. Few replicas are
compared, however many there are: some with the longest prefix, some with half of it, and two drawn
at random. Two random choices distribute requests almost as well as a comparison of all. Moreover,
several API processes, which do not know each other's requests, then do not all choose the same
replica.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from operator import attrgetter
from typing import NamedTuple, Protocol

from protocol.client.hash_ring import HashRing
from protocol.client.prefix_index import PrefixIndex
from protocol.config import RoutingPolicy

OPEN_REQUEST_TOKENS = 16
"""Tokens that an open request counts for in addition to its prompt: it takes part in every step
until it ends."""
OTHER_REQUEST_TOKENS = 128
"""Tokens that another client's request counts for, because its prompt is not known here."""
_NUM_DRAWN = 2
_MAX_HOLDERS = 3
"""Replicas drawn from those with the longest prefix, and from those with half of it."""

_MAX_HOMES = 16
"""Replicas tried as the home of a session before the policy routes the request: if none of them
serves, most others do not either."""


class Load(NamedTuple):
    """The load of a replica, as far as one client knows it."""

    num_open_requests: int
    """Open requests of this client."""
    num_unstarted_tokens: int
    """Uncached prompt tokens of those open requests that have no output yet."""
    num_other_requests: int
    """Running and waiting requests of other clients, as of the last status."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are computed before, or together with, those of a new request."""
        own = self.num_unstarted_tokens + self.num_open_requests * OPEN_REQUEST_TOKENS
        return own + self.num_other_requests * OTHER_REQUEST_TOKENS


class Target(Protocol):
    """A replica, as a router sees it."""

    @property
    def serves(self) -> bool:
        """True if it gets new requests."""

    def load(self) -> Load:
        """Return its load."""


class Candidate(NamedTuple):
    """A replica that a request may be sent to."""

    number: int
    load: Load
    num_cached_tokens: int = 0
    """Tokens of the request's prompt that the replica has cached."""

    @property
    def cost(self) -> int:
        """Tokens to compute before the request's first output, for comparison of replicas.

        The length of the prompt is the same for all, so only its cached tokens count.
        """
        return self.load.num_tokens - self.num_cached_tokens


_cost = attrgetter("cost")


def cheapest(candidates: Iterable[Candidate]) -> Candidate:
    """Return the replica with the lowest cost; the first among equals."""
    return min(candidates, key=_cost)


class Router:
    """Chooses replicas by a policy, and records their cached prefixes."""

    def __init__(
        self, policy: RoutingPolicy, targets: Sequence[Target], rng: random.Random
    ) -> None:
        self.policy = policy
        self.index = PrefixIndex()
        self.homes = HashRing()
        self._targets = targets
        self._rng = rng
        self._turns: dict[str, int] = {}
        """The replica at which the search for the next request of each kind begins."""

    def choose(
        self,
        names: Sequence[bytes] = (),
        piece_tokens: int = 0,
        may: Callable[[int], bool] | None = None,
        kind: str = "",
    ) -> Candidate | None:
        """Return a replica that serves, for a request; None if no suitable replica serves.

        Args:
            names: names of the pieces of its prompt.
            piece_tokens: number of tokens in each piece.
            may: returns whether a replica can compute the request; by default all can.
            kind: names the requests that the same replicas may compute; they take turns.
        """

        targets = self._targets

        def serves(number: int) -> bool:
            return targets[number].serves and (may is None or may(number))

        every = range(len(targets))
        if self.policy is RoutingPolicy.ROUND_ROBIN:
            number = next(_in_turn(every, self._turns.get(kind, 0), serves), None)
            if number is None:
                return None
            self._turns[kind] = number + 1
            return self._candidate(number)
        found = self._drawn(every, _NUM_DRAWN, serves)
        longest = self.index.longest(names, serves)
        for length in (longest, longest // 2):
            if length:
                holders = self.index.holders(names[length - 1])
                found |= self._drawn(holders, _MAX_HOLDERS, serves)
        candidates = [self._candidate(number, names, piece_tokens) for number in found]
        return cheapest(candidates) if candidates else None

    def home(
        self,
        affinity: str,
        names: Sequence[bytes],
        piece_tokens: int,
        may: Callable[[int], bool] | None = None,
    ) -> Candidate | None:
        """Return the replica for requests with this affinity, or None; all processes agree.

        Each value has an order of replicas, and its requests go to the first one that serves. So
        only the requests of a lost replica go elsewhere, and they return with it.
        """
        for number in islice(self.homes.of(affinity), _MAX_HOMES):
            if self._targets[number].serves and (may is None or may(number)):
                return self._candidate(number, names, piece_tokens)
        return self.choose(names, piece_tokens, may)

    def _candidate(
        self, number: int, names: Sequence[bytes] = (), piece_tokens: int = 0
    ) -> Candidate:
        num_cached = self.index.num_cached(number, names) * piece_tokens
        return Candidate(number, self._targets[number].load(), num_cached)

    def _drawn(
        self, numbers: Sequence[int], count: int, serves: Callable[[int], bool]
    ) -> dict[int, None]:
        """Draw up to `count` replicas that serve."""
        found: dict[int, None] = {}
        size = len(numbers)
        for _ in range(min(count, size)):
            first = int(self._rng.random() * size)
            number: int | None = numbers[first]
            if number in found or not serves(numbers[first]):
                in_turn = _in_turn(numbers, first, serves)
                number = next((number for number in in_turn if number not in found), None)
            if number is None:
                break
            found[number] = None
        return found


def _in_turn(numbers: Sequence[int], first: int, serves: Callable[[int], bool]) -> Iterator[int]:
    """Yield the replicas that serve, beginning at index `first`."""
    for index in range(first, first + len(numbers)):
        number = numbers[index % len(numbers)]
        if serves(number):
            yield number
