"""The link between workers and the block server of another machine, which reads its stores.

A block has the same name as in a store: layout, rank, and the hash of its prefix with the number of
a KV group. So a worker gets only what an equal worker has written. `BlockContent` is the file as it
is in the store, or a part of it: the checksum of the whole, over name and content, is verified by
the worker that asked.

Every request is complete in itself, and is answered once or, if anything is in the way, never: the
worker waits for a bounded time. A large file is read by several requests, so that a server keeps
nothing of it between two of them, and others wait no longer than for a part.
"""

from typing import Annotated

from msgspec import Meta

from protocol.core_worker import BlockKey
from protocol.message import Decoder, Message

MAX_KEYS = 2**14
"""Maximum number of names in one request: half a MiB."""
MAX_CONTENT_BYTES = 2**30
"""Largest file that is sent. Larger blocks are not read from other machines."""
PART_BYTES = 2**20
"""Maximum number of bytes of a file in one answer."""
WINDOW_BYTES = 8 * 2**20
"""Maximum number of bytes of blocks that one load has asked for and not received."""
MAX_WINDOW = 32
"""Maximum number of answers that one load has asked for and not received. ZMQ frees room in a queue
only after half of the queue was read, so the high-water mark of the link is more than twice
this."""

Layout = Annotated[str, Meta(pattern="^[0-9a-z]{1,64}$")]
Rank = Annotated[int, Meta(ge=0, lt=1024)]
Number = Annotated[int, Meta(ge=0, lt=2**53)]


class HaveBlocks(Message):
    """Worker → server: which of these blocks are there?"""

    number: Number
    layout: Layout
    rank: Rank
    keys: Annotated[list[BlockKey], Meta(max_length=MAX_KEYS)]


class ReadBlock(Message):
    """Worker → server: send one block, or a part of it."""

    number: Number
    layout: Layout
    rank: Rank
    key: BlockKey
    start: Annotated[int, Meta(ge=0, lt=MAX_CONTENT_BYTES)] = 0
    """The byte of the file at which the part begins; it ends after `PART_BYTES`."""


class BlocksHad(Message):
    """Server → worker: for each key one byte, 1 if the block is probably there."""

    number: Number
    are_there: Annotated[bytes, Meta(max_length=MAX_KEYS)]


class BlockContent(Message):
    """Server → worker: a part of the file of a block."""

    number: Number
    content: memoryview
    num_bytes: Annotated[int, Meta(ge=0, le=MAX_CONTENT_BYTES)] = 0
    """Size of the whole file; 0: it is not there."""


ToBlockServer = HaveBlocks | ReadBlock
FromBlockServer = BlocksHad | BlockContent

decode_to_server: Decoder[ToBlockServer] = Decoder(ToBlockServer)
decode_from_server: Decoder[FromBlockServer] = Decoder(FromBlockServer)
