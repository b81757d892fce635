"""The replicas of an engine. Their number may change: new ones join, and others leave.

Each replica has a number, by which routing knows it. A replica whose address is not named any more
retires: it gets no new requests once one that is named serves, and its open ones are moved. Once it
has none it is closed, and the next replica to join gets its number. While there is no replica,
requests wait at one without a core.
"""

from collections.abc import Callable, Iterator, Sequence

from protocol.client.async_client import AsyncEngineClient
from protocol.client.replica import Replica

NO_CORE = "inproc://no-core"
"""An address at which nothing listens, in no other process either."""


class ReplicaSet:
    """The replicas by number; the list itself stays the same."""

    def __init__(
        self, addresses: Sequence[str], make_client: Callable[[str], AsyncEngineClient]
    ) -> None:
        """Make a replica for each address; nothing connects yet."""
        self._make_client = make_client
        self._named = list(dict.fromkeys(addresses)) or [NO_CORE]
        self.replicas: list[Replica] = []
        self._num_inexact_before = 0
        """Of replicas that have left."""
        self.join(self._named)

    @property
    def num_inexact(self) -> int:
        """Requests that an engine with another fingerprint has continued."""
        present = (each.client.num_inexact for each in self.replicas if not each.is_closed)
        return self._num_inexact_before + sum(present)

    def join(self, addresses: Sequence[str]) -> list[Replica]:
        """Make replicas for these addresses; returns them."""
        joined = []
        vacant = (each.number for each in list(self.replicas) if each.is_closed)
        for address in addresses:
            number = next(vacant, len(self.replicas))
            replica = Replica(number, address, self._make_client(address))
            self.replicas[number : number + 1] = [replica]
            joined.append(replica)
        return joined

    def keep_only(self, addresses: Sequence[str]) -> list[str]:
        """Let the replicas retire that are not named; returns the addresses that have none yet.

        One that is named again before it was closed stays.
        """
        self._named = list(dict.fromkeys(addresses)) or [NO_CORE]
        present = [replica for replica in self.replicas if not replica.is_closed]
        for replica in present:
            replica.is_retired = replica.address not in self._named
        known = {replica.address for replica in present}
        return [address for address in self._named if address not in known]

    def substitute(self) -> Replica | None:
        """Return a retired replica that gets requests because none of those that are named serves.

        None: one of them does, or there is none to wait for.
        """
        if self._named == [NO_CORE] or any(replica.serves for replica in self.replicas):
            return None
        return next((replica for replica in self.replicas if replica.client.serves), None)

    def close_retired(self) -> Iterator[Replica]:
        """Close the replicas that have retired and hold no requests any more; yields them."""
        for replica in self.replicas:
            is_done = replica.is_retired and not replica.client.num_open_requests
            if is_done and not replica.is_closed and replica is not self.substitute():
                replica.close()
                self._num_inexact_before += replica.client.num_inexact
                yield replica
