"""What happens to the contents of the prefix cache, told in order to whoever routes requests.

A subscriber keeps the set of known hashes: it adds those of BlocksStored, takes out those of
BlocksRemoved, and empties it on AllBlocksCleared. docs/protocol.md says how hashes are computed.
"""

from typing import Annotated

from msgspec import Meta

from protocol.message import Message, Record, Text

BlockHash = Annotated[bytes, Meta(min_length=1, max_length=64)]
EventSeq = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Number of an event. Each life of the core begins at another one, so that a number of an earlier
life is never mistaken for one of this."""

Subscription = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Number of a subscription, chosen by the client: what was on its way when it began another one, or
lost the wish for any, is known by it."""


class BlocksStored(Record, tag="stored", frozen=True):
    """Full blocks, consecutive in one request, became hittable."""

    block_hashes: list[BlockHash]
    parent_hash: BlockHash | None
    """Of the block before the first; None at the beginning of a prompt."""
    token_ids: list[int]
    """Of all these blocks, in order."""
    block_size: int
    group: int
    """Index of the KV group."""
    cache_salt: str
    adapter_id: int


class BlocksRemoved(Record, tag="removed", frozen=True):
    """Contents were forgotten: no block with one of these hashes is left."""

    block_hashes: list[BlockHash]
    group: int


class AllBlocksCleared(Record, tag="cleared", frozen=True):
    """The cache is empty now."""


KVEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


class SubscribeKVEvents(Message, frozen=True):
    """Client → core: tell me all events, until I unsubscribe or the connection ends.

    ZygoteMessage again it replaces the subscription of this connection.
    """

    subscription: Subscription
    next_seq: EventSeq | None = None
    """Go on with this number. None, or a number that is not kept: begin with a snapshot."""


class UnsubscribeKVEvents(Message, frozen=True):
    """Client → core: no more events."""


class KVEventBatch(Message, frozen=True):
    """Core → client: events in order."""

    subscription: Subscription
    first_seq: EventSeq | None
    """Number of the first, each has one more than that before it; the next batch begins after the
    last. None: a part of a snapshot, whose events have no numbers. A snapshot begins with
    AllBlocksCleared and ends where a batch with a number comes, be that empty."""
    events: list[KVEvent]


class KVEventsRefused(Message, frozen=True):
    """Core → client: there will be no events; the text says why."""

    subscription: Subscription
    message: Text
