"""A replica: its client, and how long it has not served."""

from collections import deque

from protocol.api_core import EngineState
from protocol.client.async_client import AsyncEngineClient
from protocol.client.routing import Load

TICK_S = 0.1
_WITHOUT_WORKERS = 10
"""A core without workers is waited for this many times as long as one that is lost: it mostly gets
them back, and knows which requests they have died of. Workers that were killed from outside, and
whose successors load the model first, are not waited for any longer than a core."""
_NUM_RESTS = 10
"""Ticks between two tries to move requests that no other replica takes."""


class Replica:
    """One core with its workers, as a client sees it."""

    def __init__(self, number: int, address: str, client: AsyncEngineClient) -> None:
        self.number = number
        self.address = address
        self.client = client
        self.is_retired = False
        """Whether it gets no new requests, and is left by those that it has."""
        self.is_closed = False
        self.lost_s = 0.0
        """Without a connection. Counted in ticks: while the loop was blocked, nothing is known."""
        self.unready_s = 0.0
        """Without workers, or draining."""
        self.leaving: deque[int] = deque()
        """Requests that are being moved."""
        self._num_rests = 0
        self._cache_epoch = 0
        """Of the core whose cache the index describes."""

    @property
    def serves(self) -> bool:
        """Whether it gets new requests."""
        return self.client.serves and not self.is_retired

    def close(self) -> None:
        """Disconnect for good."""
        self.is_closed = True
        self.client.disconnect()

    @property
    def lateness(self) -> tuple[bool, float, float]:
        """Smallest for the replica that will probably serve first, of those that do not."""
        return self.client.facts is None, self.lost_s, self.unready_s

    def load(self) -> Load:
        client = self.client
        return Load(
            client.num_open_requests, client.num_unstarted_tokens, client.num_other_requests
        )

    @property
    def is_draining(self) -> bool:
        """Whether it finishes the requests that it has, and takes no others."""
        status = self.client.status
        is_ending = status is not None and status.state is EngineState.DRAINING
        return is_ending or self.is_retired

    def rest(self) -> None:
        """Try no moves for a while, because no other replica took a request."""
        self._num_rests = _NUM_RESTS

    @property
    def is_resting(self) -> bool:
        return self._num_rests > 0

    def tick(self) -> None:
        """Called every `TICK_S`."""
        self._num_rests = max(self._num_rests - 1, 0)
        self.lost_s = 0.0 if self.client.connected else self.lost_s + TICK_S
        self.unready_s = 0.0 if self.client.serves else self.unready_s + TICK_S

    def has_lost_cache(self, failover_s: float) -> bool:
        """Whether the core or its workers were replaced or lost since the last tick."""
        client = self.client
        if not client.connected:  # often for a moment, to the same core
            return self.lost_s >= failover_s
        is_new, self._cache_epoch = client.epoch != self._cache_epoch, client.epoch
        return is_new or not client.serves

    def ids_to_move(self, failover_s: float) -> list[int]:
        """Return the requests that cannot continue here, oldest first.

        Those of a replica that drains could not all finish in time.
        """
        client = self.client
        if not client.num_open_requests:
            return []
        is_loading = client.status is not None and client.status.is_loading_anew
        patience = 1 if is_loading else _WITHOUT_WORKERS
        is_late = self.unready_s >= patience * failover_s
        is_given_up = self.is_draining or is_late or self.lost_s >= failover_s
        return client.open_ids() if is_given_up else client.held_ids()
