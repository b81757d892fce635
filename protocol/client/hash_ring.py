"""The home of a session: the replica that gets all of its requests, the same in all processes.

This is consistent hashing (Karger et al., 1997). The address of a replica determines its points on
a circle, and the home of a session is the replica with the next point after the session's. So
processes agree even if they have seen replicas join in different orders, and only the sessions of a
replica that joins or leaves change their home.
"""

from bisect import bisect
from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain

_NUM_POINTS = 64
"""Points per replica on the circle. More points distribute the sessions more evenly."""


class HashRing:
    """The points of all replicas. Finding a home takes O(log replicas).

    The circle is rebuilt at the first lookup after a change, and therefore never if no request has
    a session.
    """

    def __init__(self) -> None:
        self._addresses: dict[int, str] = {}
        self._of_replica: dict[int, list[tuple[int, int]]] = {}
        """The points of each replica with its number; computed when first needed."""
        self._circle: list[tuple[int, int]] = []
        """All points, sorted; empty: to be rebuilt."""

    def add(self, number: int, address: str) -> None:
        """Add a replica."""
        self._addresses[number] = address
        self._of_replica.pop(number, None)
        self._circle = []

    def remove(self, number: int) -> None:
        del self._addresses[number]
        self._of_replica.pop(number, None)
        self._circle = []

    def of(self, session: str) -> Iterator[int]:
        """Yield the replicas in the order in which they would be the session's home."""
        circle = self._circle = self._circle or self._make_circle()
        first = bisect(circle, (_point(session), -1))
        seen = set()
        for index in range(first, first + len(circle)):
            _, number = circle[index % len(circle)]
            if number not in seen:
                seen.add(number)
                yield number

    def _make_circle(self) -> list[tuple[int, int]]:
        for number, address in self._addresses.items():
            if number not in self._of_replica:
                names = (f"{index} {address}" for index in range(_NUM_POINTS))
                self._of_replica[number] = [(_point(name), number) for name in names]
        return sorted(chain.from_iterable(self._of_replica.values()))


def _point(name: str) -> int:
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
