"""The link between workers and the block server of another machine, which reads its stores.

A block has the same name as in a store: layout, rank, and the hash of its prefix with the number of
a KV group. So a worker gets only what an equal worker has written. `BlockContent` is the file as it
is in the store: its checksum, over name and content, is verified by the worker that asked.

Every request is complete in itself, and is answered once or, if anything is in the way, never: the
worker waits for a bounded time.
"""

from typing import Annotated

from msgspec import Meta

from protocol.core_worker import BlockKey
from protocol.message import Decoder, Message

MAX_KEYS = 2**14
"""Names in one request: half a MiB."""
MAX_CONTENT_BYTES = 15 * 2**20
"""Of a file that is sent: it fits in a frame. Larger blocks are not read from other machines."""
WINDOW_BYTES = 8 * 2**20
"""Most bytes of blocks that one load has asked for and not received."""
MAX_WINDOW = 32
"""Most blocks; a server keeps more than this for each connection before it leaves answers out."""

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
    """Worker → server: send one block."""

    number: Number
    layout: Layout
    rank: Rank
    key: BlockKey


class BlocksHad(Message):
    """Server → worker: for each key one byte, 1 if the block is probably there."""

    number: Number
    are_there: Annotated[bytes, Meta(max_length=MAX_KEYS)]


class BlockContent(Message):
    """Server → worker: the file of a block; empty: it is not there."""

    number: Number
    content: memoryview


ToBlockServer = HaveBlocks | ReadBlock
FromBlockServer = BlocksHad | BlockContent

decode_to_server: Decoder[ToBlockServer] = Decoder(ToBlockServer)
decode_from_server: Decoder[FromBlockServer] = Decoder(FromBlockServer)
