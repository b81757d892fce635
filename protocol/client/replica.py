"""A replica: its client, and how long it has not served."""

from collections import deque

from protocol.api_core import EngineState
from protocol.client.async_client import AsyncEngineClient
from protocol.client.routing import Load

TICK_S = 0.1
_WITHOUT_WORKERS = 10
"""The client waits this many times as long for a core that has lost its workers as for a lost core:
the core usually gets them back, and it knows which requests they died of. For workers that were
killed from outside and must load the model again, the client waits only as long as for a lost core.
A new core that has no workers yet counts as lost: it has no facts, so the client does not agree on
its epoch."""
_NUM_RESTS = 10
"""Ticks between two attempts to move requests that no other replica accepts."""


class Replica:
    """A core with its workers, as a client sees it."""

    def __init__(self, number: int, address: str, client: AsyncEngineClient) -> None:
        self.number = number
        self.address = address
        self.client = client
        self.engine = client.engine
        self.requests = client.requests
        self.is_retired = False
        """True if it gets no new requests and its open requests are moved."""
        self.is_closed = False
        self.lost_s = 0.0
        """Seconds without a connection, counted in ticks: while the loop is blocked, nothing is
        known."""
        self.unready_s = 0.0
        """Seconds without workers, or draining."""
        self.leaving: deque[int] = deque()
        """Requests that are being moved."""
        self._num_rests = 0
        self._cache_epoch = 0
        """Epoch of the core whose cache the index describes."""

    @property
    def serves(self) -> bool:
        """True if it gets new requests."""
        return self.client.serves and not self.is_retired

    def close(self) -> None:
        """Disconnect for good."""
        self.is_closed = True
        self.client.disconnect()

    @property
    def lateness(self) -> tuple[bool, float, float]:
        """Sort key, smallest for the replica that will probably serve first of the others."""
        return self.engine.facts is None, self.lost_s, self.unready_s

    def load(self) -> Load:
        requests, num_others = self.requests, self.engine.num_other_requests
        return Load(len(requests), requests.ledger.num_unstarted_tokens, num_others)

    @property
    def is_draining(self) -> bool:
        """True if it finishes its requests and accepts no others."""
        status = self.engine.status
        is_ending = status is not None and status.state is EngineState.DRAINING
        return is_ending or self.is_retired

    def rest(self) -> None:
        """Attempt no moves for a while, because no other replica accepted a request."""
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
        """Return whether the core or its workers were replaced or lost since the last tick."""
        client = self.client
        if not client.connected:  # often briefly, and again to the same core
            return self.lost_s >= failover_s
        is_new, self._cache_epoch = client.epoch != self._cache_epoch, client.epoch
        return is_new or not client.serves

    def ids_to_move(self, failover_s: float) -> list[int]:
        """Return the requests that cannot continue here, oldest first.

        A draining replica could not finish all of its requests in time.
        """
        requests, status = self.requests, self.engine.status
        if not requests:
            return []
        is_loading = status is not None and status.is_loading_anew
        patience = 1 if is_loading else _WITHOUT_WORKERS
        is_late = self.unready_s >= patience * failover_s
        is_given_up = self.is_draining or is_late or self.lost_s >= failover_s
        return requests.ids() if is_given_up else requests.held_ids()
