"""Answers the workers of other machines about the blocks that are stored here.

It keeps nothing about them. A request is answered at once; if a connection takes no more answers,
the answer is left out.
"""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

import zmq

from protocol.config import EngineConfig
from protocol.message import NO_EPOCH, ProtocolError, encode
from protocol.process.machines import blocks_address
from protocol.stores.block_link import (
    BlockContent,
    BlocksHad,
    FromBlockServer,
    HaveBlocks,
    decode_to_server,
)
from protocol.transport.channel import HighWaterMark, PeerGone, Received, RouterChannel
from protocol.transport.curve import ClientAuthenticator, read_server_keys
from scripts.block_server.stored_blocks import StoredBlocks

_DRAIN_LIMIT = 8
"""The number of requests for parts of blocks in one turn: new connections do not wait for long."""
_FIRST_ASKED_S = 3.0
"""The time from a drain to the end, if no block is read. Requests that continue elsewhere ask from
there."""
_LAST_ASKED_S = 2.0
"""The time from the last question to the end."""

log = logging.getLogger("troika.block_server")


class BlockServer:
    """The sockets and stores of one machine."""

    def __init__(self, config: EngineConfig, run_dir: str, now: Callable[[], float]) -> None:
        """Listen; ValueError: the keys or the address cannot be used."""
        address, directory = blocks_address(config), config.parallel.curve_keys
        assert address
        assert directory is not None
        keys = read_server_keys(Path(directory))
        self._now = now
        self._stored = StoredBlocks(config)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ClientAuthenticator(self._context, keys.directory, keys.public)
        self._link = RouterChannel(
            self._context, f"ipc://{run_dir}/blocks.sock", HighWaterMark.BLOCK_LINK
        )
        try:
            self._link.listen(address, keys)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ValueError(f"kv_listen {address} cannot be used: {error.strerror}") from error
        self._asked_at: float | None = None
        self._drains_at: float | None = None

    @property
    def sockets(self) -> list[zmq.Socket[bytes]]:
        """Sockets to poll for `turn`."""
        return [self._authenticator.socket, self._link.socket]

    def turn(self) -> None:
        """Answer what has arrived, a bounded number of requests."""
        self._authenticator.answer()
        for received in self._link.drain(_DRAIN_LIMIT):
            self._asked_at = self._now()
            try:
                answer = self._answer(received)
            except ProtocolError as error:
                log.warning("unreadable request for blocks: %s", error)
                continue
            with contextlib.suppress(PeerGone):
                self._link.send(received.peer, NO_EPOCH, encode(answer))

    def _answer(self, received: Received) -> FromBlockServer:
        request = decode_to_server(received.body)
        layout, rank = request.layout, request.rank
        if isinstance(request, HaveBlocks):
            return BlocksHad(request.number, self._stored.have(layout, rank, request.keys))
        content, num_bytes = self._stored.read(layout, rank, request.key, request.start)
        return BlockContent(request.number, memoryview(content), num_bytes)

    def drain(self) -> None:
        """Begin to wait until no other machine asks any more."""
        if self._drains_at is None:
            self._drains_at = self._now()

    @property
    def is_drained(self) -> bool:
        if self._drains_at is None:
            return False
        end = self._drains_at + _FIRST_ASKED_S
        if self._asked_at is not None and self._asked_at > self._drains_at:
            end = self._asked_at + _LAST_ASKED_S
        return self._now() >= end

    def close(self) -> None:
        self._context.destroy(linger=0)
