"""The replicas of an engine. Their number may change: new ones join, and others leave.

Each replica has a number, by which routing knows it. A replica whose address is no longer listed
retires: it gets no new requests once a listed one serves, and its open requests are moved. Once it
has none, it is closed, and the next replica to join gets its number. While there is no replica,
requests wait at a placeholder without a core.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

from protocol.client.async_client import AsyncEngineClient
from protocol.client.replica import Replica
from protocol.config.addresses import is_remote

_SILENCE_S = 10.0
"""Seconds without a connection after which a replica is reported."""
_MAX_CHARACTERS = 500
"""Maximum length of a description of differences."""
_MAX_EXPLAINED = 4
"""Maximum number of replicas in the reason why none serves."""
NO_CORE = "inproc://no-core"
"""An address at which nothing listens, in no other process either."""


class ReplicaSet:
    """The replicas by number; the list itself is never replaced."""

    def __init__(
        self, addresses: Sequence[str], make_client: Callable[[str], AsyncEngineClient]
    ) -> None:
        """Make a replica for each address; nothing connects yet."""
        self._make_client = make_client
        self._named = list(dict.fromkeys(addresses)) or [NO_CORE]
        self.replicas: list[Replica] = []
        self._num_inexact_before = 0
        """Count of the replicas that have left."""
        self._fingerprints: dict[Replica, str] = {}
        """Fingerprints of the replicas that have served."""
        self._others: dict[Replica, str] = {}
        """Replicas that were reported to have another model, and how it differs."""
        self._silent: set[Replica] = set()
        """Replicas that were reported as not connected."""
        self.join(self._named)

    @property
    def num_inexact(self) -> int:
        """Requests that were continued by an engine with another fingerprint."""
        present = (each.client.num_inexact for each in self.replicas if not each.is_closed)
        return self._num_inexact_before + sum(present)

    def join(self, addresses: Sequence[str]) -> list[Replica]:
        """Add and return replicas for these addresses."""
        joined = []
        vacant = (each.number for each in list(self.replicas) if each.is_closed)
        for address in addresses:
            number = next(vacant, len(self.replicas))
            replica = Replica(number, address, self._make_client(address))
            self.replicas[number : number + 1] = [replica]
            joined.append(replica)
        return joined

    def keep_only(self, addresses: Sequence[str]) -> list[str]:
        """Retire the replicas that are not listed; return the addresses that have no replica yet.

        A replica that is listed again before it was closed stays.
        """
        self._named = list(dict.fromkeys(addresses)) or [NO_CORE]
        present = [replica for replica in self.replicas if not replica.is_closed]
        for replica in present:
            replica.is_retired = replica.address not in self._named
        known = {replica.address for replica in present}
        return [address for address in self._named if address not in known]

    def substitute(self) -> Replica | None:
        """Return a retired replica that gets requests because no listed one serves.

        None if a listed one serves, or if there is no replica to wait for.
        """
        if self._named == [NO_CORE] or any(replica.serves for replica in self.replicas):
            return None
        return next((replica for replica in self.replicas if replica.client.serves), None)

    def close_retired(self) -> Iterator[Replica]:
        """Close and yield the retired replicas that no longer hold requests."""
        for replica in self.replicas:
            is_done = replica.is_retired and not replica.client.num_open_requests
            if is_done and not replica.is_closed and replica is not self.substitute():
                replica.close()
                self._fingerprints.pop(replica, None)
                self._silent.discard(replica)
                self._others.pop(replica, None)
                self._num_inexact_before += replica.client.num_inexact
                yield replica

    def why_not_ready(self) -> str:
        """Return why replicas do not serve: the first of them, and the number of the others."""
        present = [each for each in self.replicas if not each.is_closed and not each.is_retired]
        shown = [
            f"replica {replica.number}: {replica.client.why_not_ready()}"
            for replica in present[:_MAX_EXPLAINED]
            if replica.address != NO_CORE
        ]
        if len(present) > _MAX_EXPLAINED:
            shown.append(f"{len(present) - _MAX_EXPLAINED} more")
        return "; ".join(shown)

    def silences(self) -> Iterator[tuple[int, str]]:
        """Yield a severity and a line for each remote replica that is lost or back."""
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

    def other_models(self) -> Iterator[tuple[int, str]]:
        """Yield a severity and a line for each replica that has another model, or no longer has."""
        for replica in self.replicas:
            text, before = replica.engine.other_model, self._others.get(replica, "")
            if text == before or replica.is_closed:
                continue
            self._others[replica] = text
            name = f"replica {replica.number}, {replica.address},"
            if text:
                yield logging.ERROR, f"{name} gets no requests: its {text}"
            else:
                yield logging.INFO, f"{name} has the same model as the others again"

    def differences(self) -> Iterator[str]:
        """Yield a line for each replica that has begun to serve with another fingerprint."""
        for replica in self.replicas:
            fingerprint = replica.engine.fingerprint
            if not replica.serves or self._fingerprints.get(replica) == fingerprint:
                continue
            self._fingerprints[replica] = fingerprint
            known = (one for one, found in self._fingerprints.items() if found != fingerprint)
            if (other := next((one for one in known if one.serves), None)) is not None:
                yield _difference(replica, other)


def _difference(replica: Replica, other: Replica) -> str:
    facts, others = replica.engine.facts, other.engine.facts
    changes = "" if facts is None or others is None else facts.decisive_changes(others)
    return (
        f"replica {replica.number} computes differently from replica {other.number}, so a request"
        f" begun by one of them cannot continue at the other: {changes[:_MAX_CHARACTERS]}"
    )
