"""Changes of the prefix cache's contents, in order, for programs that route requests.

A subscriber keeps the set of known hashes: it adds those of BlocksStored, removes those of
BlocksRemoved, and empties it on AllBlocksCleared. A router computes the hashes of a prompt itself;
docs/protocol.md defines them for clients in other languages.
"""

import hashlib
from array import array
from typing import Annotated, Protocol

from msgspec import Meta

from protocol.message import Message, Record, Text

BlockHash = Annotated[bytes, Meta(min_length=1, max_length=64)]
EventSeq = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Number of an event. Each incarnation of the core begins at another one, so that numbers never
mean two events."""

Subscription = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Number of a subscription, chosen by the client. It distinguishes its batches from those of an
earlier subscription."""


class BlocksStored(Record, tag="stored"):
    """Full blocks, consecutive in one request, can be hit from now on."""

    block_hashes: list[BlockHash]
    parent_hash: BlockHash | None
    """Hash of the block before the first; None at the beginning of a prompt."""
    token_ids: list[int]
    block_size: int
    group: int
    """Index in `ModelFacts.kv_groups`."""
    cache_salt: str
    adapter_id: int


class BlocksRemoved(Record, tag="removed"):
    """Contents were dropped: no block holds one of these hashes any more."""

    block_hashes: list[BlockHash]
    group: int


class AllBlocksCleared(Record, tag="cleared"):
    """The cache is empty."""


KVEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


class SubscribeKVEvents(Message):
    """Client → core: send all events until `UnsubscribeKVEvents` or the end of the connection.

    A second one replaces the subscription of this connection.
    """

    subscription: Subscription
    next_seq: EventSeq | None = None
    """First number wanted. None, or a number that is not kept: begin with a snapshot."""


class UnsubscribeKVEvents(Message):
    """Client → core: end the subscription."""


class KVEventBatch(Message):
    """Core → client: events in order."""

    subscription: Subscription
    first_seq: EventSeq | None
    """Number of the first event; the next batch begins after the last. None: a part of a snapshot,
    whose events have no numbers. A snapshot begins with AllBlocksCleared and ends with the next
    batch that has a number, which may be empty."""
    events: list[KVEvent]


class KVEventsRefused(Message):
    """Core → client: the subscription is refused; the text gives the reason."""

    subscription: Subscription
    message: Text


class PrefixHash(Protocol):
    """The part of hashlib's objects that is used."""

    def update(self, data: "array[int] | bytes | memoryview", /) -> None:
        """Take further tokens, packed as 4 bytes each."""

    def digest(self) -> bytes:
        """Return the hash of the prefix up to here."""


def prefix_root(cache_salt: str = "", adapter_id: int = 0, adapter_digest: bytes = b"") -> bytes:
    """Return all that a prefix depends on besides its tokens; no root is a prefix of another."""
    salt = cache_salt.encode()
    return (
        adapter_id.to_bytes(8, "little") + len(salt).to_bytes(4, "little") + salt + adapter_digest
    )


def prefix_hash(root: bytes) -> PrefixHash:
    """Return the hash of the empty prefix."""
    return hashlib.sha256(root)
