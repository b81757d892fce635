"""The home of a session: the replica to which all its requests go, as all processes choose it.

This is consistent hashing (Karger et al., 1997). A replica has some points on a circle, which
follow from its address, and the home of a session is the replica with the next point after that of
the session. So processes that have seen replicas join in another order agree, and only the sessions
of a replica that joins or leaves have another home.
"""

from bisect import bisect, insort
from collections.abc import Iterator
from hashlib import blake2b

_NUM_POINTS = 64
"""Of each replica. More of them spread the sessions more evenly."""


class Homes:
    """The points of all replicas. To find a home takes O(log replicas)."""

    def __init__(self) -> None:
        self._points: list[tuple[int, int]] = []
        """Sorted, each with the number of its replica."""

    def add(self, number: int, address: str) -> None:
        """Enter a replica."""
        for index in range(_NUM_POINTS):
            insort(self._points, (_point(f"{index} {address}"), number))

    def remove(self, number: int) -> None:
        self._points = [point for point in self._points if point[1] != number]

    def of(self, session: str) -> Iterator[int]:
        """Yield the replicas in the order in which they are the session's home."""
        first = bisect(self._points, (_point(session), -1))
        seen = set()
        for index in range(first, first + len(self._points)):
            _, number = self._points[index % len(self._points)]
            if number not in seen:
                seen.add(number)
                yield number


def _point(name: str) -> int:
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")
