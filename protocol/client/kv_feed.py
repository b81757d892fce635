"""A client's subscription to the core's KV events: each event once and in order, or a new snapshot.

Opens no sockets: batches go in; events to read and messages to send come out. The core sends only a
few batches ahead of the reader, so that a slow reader needs bounded memory and keeps its position.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Self

from protocol.api_core import KVEventsTaken
from protocol.kv_events import (
    AllBlocksCleared,
    KVEvent,
    KVEventBatch,
    KVEventsRefused,
    SubscribeKVEvents,
    UnsubscribeKVEvents,
)

Send = Callable[[SubscribeKVEvents | UnsubscribeKVEvents | KVEventsTaken], None]


class KVEventFeed:
    """An asynchronous iterator of (number, event).

    A snapshot begins with AllBlocksCleared, and its events have the number None. A snapshot follows
    after a restart of the core, or if events were missed. The iterator raises ValueError if the
    engine records no events, and ConnectionError when the client is closed. As a context manager it
    ends the subscription when its block is left.
    """

    def __init__(
        self, next_seq: int | None, numbers: Iterator[int], send: Send, end: Callable[[], None]
    ) -> None:
        """Subscribe from event `next_seq`, or with a snapshot if that is None.

        `numbers` yields subscription numbers that are new to this connection; `end` is called once,
        when the feed is cancelled or fails.
        """
        self._next_seq = next_seq
        self._numbers = numbers
        self._send = send
        self._end = end
        self._unread: deque[tuple[int | None, KVEvent]] = deque()
        self._num_untaken = 0
        """Batches that have arrived but are not yet acknowledged by KVEventsTaken."""
        self._in_snapshot = False
        self._is_cancelled = False
        self._error: Exception | None = None
        self._changed = asyncio.Event()
        self.subscribe()

    def subscribe(self) -> None:
        """Send the subscription; to be called again on every new connection."""
        self._in_snapshot = False
        self._subscription = next(self._numbers)
        self._send(SubscribeKVEvents(self._subscription, self._next_seq))

    def __aiter__(self) -> AsyncIterator[tuple[int | None, KVEvent]]:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    async def __anext__(self) -> tuple[int | None, KVEvent]:
        while not self._unread:
            if self._error is not None:
                raise self._error
            if self._is_cancelled:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()
        item = self._unread.popleft()
        if not self._unread:
            self._acknowledge()
        return item

    @property
    def num_unread(self) -> int:
        """Events that have arrived but are not yet read."""
        return len(self._unread)

    def cancel(self) -> None:
        """End the subscription and the iteration. Idempotent."""
        if not self._is_cancelled and self._error is None:
            self._is_cancelled = True
            self._unread.clear()
            self._acknowledge()
            self._send(UnsubscribeKVEvents())
            self._end()
            self._changed.set()

    def take(self, batch: KVEventBatch) -> None:
        """Add a batch if it is the expected one."""
        self._num_untaken += 1
        if self._is_next(batch):
            if batch.first_seq is None:
                self._unread.extend((None, event) for event in batch.events)
            else:
                self._unread.extend(enumerate(batch.events, batch.first_seq))
                self._next_seq = batch.first_seq + len(batch.events)
            self._changed.set()
        if not self._unread:
            self._acknowledge()

    def _acknowledge(self) -> None:
        for _ in range(self._num_untaken):
            self._send(KVEventsTaken())
        self._num_untaken = 0

    def _is_next(self, batch: KVEventBatch) -> bool:
        """Return whether a batch is the expected one; after a gap, subscribe again."""
        if batch.subscription != self._subscription:  # an earlier one, of this feed or another
            return False
        if batch.first_seq is None:
            if batch.events and isinstance(batch.events[0], AllBlocksCleared):
                self._in_snapshot = True
                self._next_seq = None
            return self._in_snapshot
        if self._in_snapshot or batch.first_seq == self._next_seq:
            self._in_snapshot = False
            return True
        self.subscribe()
        return False

    def refuse(self, refused: KVEventsRefused) -> None:
        """Fail if the current subscription is refused."""
        if refused.subscription == self._subscription:
            self.fail(ValueError(refused.message))

    def fail(self, error: Exception) -> None:
        """End the feed with an error, which is raised after the unread events."""
        self._error = error
        self._acknowledge()  # for the next feed of this connection
        self._end()
        self._changed.set()
