"""Chooses a replica for a request.

A request costs its replica the tokens that are computed before its first output: those of the
requests before it, and those of its own prompt that are not cached. `prefix_aware` takes the
replica where the sum is smallest, so that a cached token counts as much as a waiting one. Few
replicas are compared, however many there are: some of those that have the longest prefix, some that
have half of it, and two drawn at random. Two random choices spread requests almost as well as a
comparison of all. Besides, several API processes, which do not know each other's requests, then do
not all choose the same replica.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple, Protocol

from protocol.client.homes import Homes
from protocol.client.prefix_index import PrefixIndex
from protocol.config import RoutingPolicy

OPEN_REQUEST_TOKENS = 16
"""Tokens that an open request counts for besides its prompt: it takes part in every step until it
ends."""
OTHER_REQUEST_TOKENS = 128
"""Tokens that another client's request counts for, because its prompt is not known here."""
_NUM_DRAWN = 2
_MOST_HOLDERS = 3
"""Replicas drawn from those with the longest prefix, and from those with half of it."""

_MOST_HOMES = 16
"""Replicas tried as the home of a session before the policy routes the request: if as many do not
serve, most others do not either."""


class Load(NamedTuple):
    """The work of a replica, as far as one client knows it."""

    num_open_requests: int
    """Open requests of this client."""
    num_unstarted_tokens: int
    """Uncached prompt tokens of those of these requests that have no output yet."""
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
        """Whether it gets new requests."""

    def load(self) -> Load:
        """Return what it has to do."""


class Candidate(NamedTuple):
    """A replica that a request may be sent to."""

    number: int
    load: Load
    num_cached_tokens: int = 0
    """Tokens of the request's prompt that the replica has cached."""

    @property
    def cost(self) -> int:
        """Tokens to compute before the request's first output, compared with other replicas.

        Its prompt is as long at all of them, so only its cached tokens count.
        """
        return self.load.num_tokens - self.num_cached_tokens


def cheapest(candidates: Iterable[Candidate]) -> Candidate:
    """Return the replica with the lowest cost; among equals, the first."""
    return min(candidates, key=lambda candidate: candidate.cost)


class Router:
    """Chooses replicas by a policy, and remembers what they have cached."""

    def __init__(
        self, policy: RoutingPolicy, targets: Sequence[Target], rng: random.Random
    ) -> None:
        self.policy = policy
        self.index = PrefixIndex()
        self.homes = Homes()
        self._targets = targets
        self._rng = rng
        self._turns: dict[str, int] = {}
        """Of the requests of each kind, where the next one goes."""

    def choose(
        self,
        names: Sequence[bytes] = (),
        piece_tokens: int = 0,
        may: Callable[[int], bool] | None = None,
        kind: str = "",
    ) -> Candidate | None:
        """Return a replica that serves for a request; None: there is none.

        Args:
            names: of the pieces of its prompt.
            piece_tokens: of each piece.
            may: whether the request can be computed at a replica; by default at all of them.
            kind: requests that may be computed at the same replicas; they take turns.
        """

        def serves(number: int) -> bool:
            return self._targets[number].serves and (may is None or may(number))

        every = range(len(self._targets))
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
                found |= self._drawn(holders, _MOST_HOLDERS, serves)
        candidates = [self._candidate(number, names, piece_tokens) for number in found]
        return cheapest(candidates) if candidates else None

    def home(
        self,
        affinity: str,
        names: Sequence[bytes],
        piece_tokens: int,
        may: Callable[[int], bool] | None = None,
    ) -> Candidate | None:
        """Return the replica for requests with this value; None: none serves. All processes agree.

        Each value has an order of replicas, and its requests go to the first one that serves. So
        only those of a lost replica go elsewhere, and return with it.
        """
        for number in islice(self.homes.of(affinity), _MOST_HOMES):
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
        """Draw some replicas that serve; all of them, if there are no more."""
        found: dict[int, None] = {}
        for _ in range(min(count, len(numbers))):
            in_turn = _in_turn(numbers, self._rng.randrange(len(numbers)), serves)
            number = next((number for number in in_turn if number not in found), None)
            if number is None:
                break
            found[number] = None
        return found


def _in_turn(numbers: Sequence[int], first: int, serves: Callable[[int], bool]) -> Iterator[int]:
    """Yield the replicas that serve, beginning with that of index `first`."""
    for index in range(first, first + len(numbers)):
        number = numbers[index % len(numbers)]
        if serves(number):
            yield number
