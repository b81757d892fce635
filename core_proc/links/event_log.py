"""The KV events of one life of the core: numbered, kept for replay, cut into batches. No sockets.

Every subscriber has a place in the log and is sent the events after it, a bounded part in each turn
and no more than it has room for: a large snapshot does not delay the loop, and a subscriber that
does not read costs nothing. Events are kept encoded, which takes a fraction of the memory, and each
is encoded once for all subscribers.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import cast

import msgspec

from core_proc.outputs.owners import Client
from protocol.kv_events import (
    AllBlocksCleared,
    KVEvent,
    KVEventBatch,
    KVEventsRefused,
    SubscribeKVEvents,
)
from protocol.message import encode

MAX_KEPT_EVENTS = 65_536
MAX_KEPT_BYTES = 64 * 2**20
MAX_BATCH_EVENTS = 1000
MAX_BATCH_BYTES = 2**17
"""A batch ends with the event that reaches this size: about a millisecond of the loop."""

MAX_UNTAKEN_BATCHES = 2
"""Sent to one client and not taken yet, also over several subscriptions."""

_SEQS_PER_LIFE = 2**32
_NOT_KEPT = 0
"""No event has this number."""

Snapshot = Callable[[], Iterable[KVEvent]]


@dataclass(slots=True)
class _Subscriber:
    subscription: int
    next_seq: int
    snapshot: Iterator[KVEvent] | None = None
    """The rest of a snapshot; the log continues after it, from `next_seq`."""


class EventLog:
    """The newest events, and the place of each subscriber."""

    def __init__(self, epoch: int, snapshot: Snapshot) -> None:
        """Number the events of life `epoch`; `snapshot` returns all that the cache holds."""
        self._next_seq = epoch * _SEQS_PER_LIFE + 1
        self._snapshot = snapshot
        self._kept: list[bytes] = []
        self._num_kept_bytes = 0
        self._subscribers: dict[Client, _Subscriber] = {}
        self._num_untaken: dict[Client, int] = {}

    def append(self, events: Iterable[KVEvent]) -> None:
        """Number events, and drop the oldest ones beyond the bounds."""
        for event in events:
            body = encode(event)
            self._kept.append(body)
            self._num_kept_bytes += len(body)
            self._next_seq += 1
        excess = 0
        while len(self._kept) - excess > MAX_KEPT_EVENTS or self._num_kept_bytes > MAX_KEPT_BYTES:
            self._num_kept_bytes -= len(self._kept[excess])
            excess += 1
        del self._kept[:excess]

    def subscribe(self, client: Client, asked: SubscribeKVEvents) -> None:
        """Send a client all events from `asked.next_seq` on, or a snapshot and all after it."""
        # If that event is not kept any more, the first batch begins a snapshot.
        next_seq = _NOT_KEPT if asked.next_seq is None else asked.next_seq
        self._subscribers[client] = _Subscriber(asked.subscription, next_seq)

    def unsubscribe(self, client: Client) -> None:
        self._subscribers.pop(client, None)

    def refuse(self, client: Client, reason: str) -> KVEventsRefused:
        """End a subscription; returns the message for its client."""
        return KVEventsRefused(self._subscribers.pop(client).subscription, reason)

    def taken(self, client: Client) -> None:
        """Note that a client has room for another batch."""
        self._num_untaken[client] = max(0, self._num_untaken.get(client, 0) - 1)

    def forget(self, client: Client) -> None:
        """Remove a client that is gone or connects again: it holds no batch any more."""
        self._subscribers.pop(client, None)
        self._num_untaken.pop(client, None)

    def _keeps(self, seq: int) -> bool:
        return self._next_seq - len(self._kept) <= seq <= self._next_seq

    def _snapshot_part(self, subscriber: _Subscriber) -> list[bytes]:
        """Continue a snapshot, or begin one if the log does not reach back far enough.

        A slow reader, too, gets it to its end, however far the log has advanced meanwhile.
        """
        if subscriber.snapshot is not None:
            bodies = _batch(map(encode, subscriber.snapshot))
            if bodies:
                return bodies
            subscriber.snapshot = None
        if self._keeps(subscriber.next_seq):
            return []
        subscriber.next_seq = self._next_seq
        cleared: list[KVEvent] = [AllBlocksCleared()]
        snapshot = subscriber.snapshot = chain(cleared, self._snapshot())
        return _batch(map(encode, snapshot))

    def waiting(self) -> list[Client]:
        """Return the subscribers that have room and have not received all events."""
        return [
            client
            for client, subscriber in self._subscribers.items()
            if (subscriber.snapshot is not None or subscriber.next_seq != self._next_seq)
            and self._num_untaken.get(client, 0) < MAX_UNTAKEN_BATCHES
        ]

    def take_batch(self, client: Client) -> KVEventBatch:
        """Return the next batch for a subscriber that waits; called once in a turn."""
        subscriber = self._subscribers[client]
        batch = self._next_batch(subscriber)
        self._num_untaken[client] = self._num_untaken.get(client, 0) + 1
        return batch

    def _next_batch(self, subscriber: _Subscriber) -> KVEventBatch:
        bodies = self._snapshot_part(subscriber)
        if bodies:
            return _message(subscriber, None, bodies)
        first = subscriber.next_seq
        index = len(self._kept) - (self._next_seq - first)
        bodies = _batch(iter(self._kept[index : index + MAX_BATCH_EVENTS]))
        subscriber.next_seq = first + len(bodies)
        return _message(subscriber, first, bodies)


def _batch(bodies: Iterator[bytes]) -> list[bytes]:
    """Take as many events as one message may hold, at least one if there is any."""
    taken: list[bytes] = []
    num_bytes = 0
    for body in bodies:
        taken.append(body)
        num_bytes += len(body)
        if len(taken) == MAX_BATCH_EVENTS or num_bytes >= MAX_BATCH_BYTES:
            break
    return taken


def _message(subscriber: _Subscriber, first_seq: int | None, bodies: list[bytes]) -> KVEventBatch:
    events = cast(list[KVEvent], list(map(msgspec.Raw, bodies)))
    return KVEventBatch(subscriber.subscription, first_seq, events)
