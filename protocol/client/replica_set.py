"""The replicas of an engine. Their number may change: new ones join, and others leave.

Each replica has a number, by which routing knows it. A replica whose address is not named any more
retires: it gets no new requests once one that is named serves, and its open ones are moved. Once it
has none it is closed, and the next replica to join gets its number. While there is no replica,
requests wait at one without a core.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

from protocol.client.async_client import AsyncEngineClient
from protocol.client.replica import Replica
from protocol.config.addresses import is_remote

_SILENCE_S = 10.0
"""Without a connection, after which a line reports it."""
_MOST_CHARACTERS = 500
"""Of a description of what differs."""
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
        self._fingerprints: dict[Replica, str] = {}
        """Of the replicas that have served."""
        self._silent: set[Replica] = set()
        """Replicas of which it was reported that they are not connected."""
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
                self._fingerprints.pop(replica, None)
                self._num_inexact_before += replica.client.num_inexact
                yield replica

    def silences(self) -> Iterator[tuple[int, str]]:
        """Yield a severity and a line for each replica of another machine that is lost or back."""
        for replica in self.replicas:
            is_silent = replica.lost_s > _SILENCE_S and not replica.is_closed
            if is_silent is (replica in self._silent) or not is_remote(replica.address):
                continue
            name = f"replica {replica.number}, {replica.address},"
            if is_silent:
                self._silent.add(replica)
                problem = replica.client.link_problem or "nothing answers there"
                yield logging.WARNING, f"{name} is not connected: {problem}"
            else:
                self._silent.discard(replica)
                if not replica.is_closed:
                    yield logging.INFO, f"{name} is connected"

    def differences(self) -> Iterator[str]:
        """Yield a line for each replica that has begun to serve with another fingerprint."""
        for replica in self.replicas:
            fingerprint = replica.client.fingerprint
            if not replica.serves or self._fingerprints.get(replica) == fingerprint:
                continue
            self._fingerprints[replica] = fingerprint
            known = (one for one, found in self._fingerprints.items() if found != fingerprint)
            if (other := next((one for one in known if one.serves), None)) is not None:
                yield _difference(replica, other)


def _difference(replica: Replica, other: Replica) -> str:
    facts, others = replica.client.facts, other.client.facts
    changes = "" if facts is None or others is None else facts.decisive_changes(others)
    return (
        f"replica {replica.number} computes otherwise than replica {other.number}, and a request"
        f" that one of them has begun does not go on at the other: {changes[:_MOST_CHARACTERS]}"
    )
