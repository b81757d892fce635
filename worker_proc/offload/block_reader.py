"""A connection to the block server of another machine, with a deadline for every wait.

Parts of blocks are requested ahead, within the window of the connection.
"""

import contextlib
import itertools
import socket
import time
from collections import deque
from collections.abc import Iterator, Sequence
from enum import Enum, auto
from typing import NamedTuple

import zmq

from protocol.message import NO_EPOCH, ProtocolError, encode
from protocol.stores.block_link import (
    MAX_WINDOW,
    PART_BYTES,
    WINDOW_BYTES,
    BlockContent,
    BlocksHad,
    FromBlockServer,
    HaveBlocks,
    ReadBlock,
    decode_from_server,
)
from protocol.transport.channel import DealerChannel, HighWaterMark, LinkEvent
from protocol.transport.curve import ClientKeys
from worker_proc.offload.block_file import Unpacking, file_bytes
from worker_proc.offload.memory import Parts

ANSWER_TIMEOUT_S = 2.0
"""The longest wait for a connection, and for each answer."""


class Wanted(NamedTuple):
    """A block to read, and the memory for it."""

    key: bytes
    block: Parts


class Outcome(Enum):
    """The outcome of reading a block; its content is undefined unless it is `READ`."""

    READ = auto()
    NOT_THERE = auto()
    DAMAGED = auto()
    """Something else is stored there, or its parts do not fit together."""


class BlockReader:
    """A connection to the block server of another machine; used by one thread at a time."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        keys: ClientKeys,
        layout: str,
        rank: int,
    ) -> None:
        """Connect; raise OSError if there is no such server, or if it refuses the keys."""
        self.address = address
        self._layout = layout
        self._rank = rank
        self._numbers = itertools.count()
        self._expected: deque[int] = deque()
        """Numbers of the unanswered requests, in order."""
        self._is_connected = False
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        # ZMQ would retry forever if nothing listens.
        try:
            socket.create_connection((host, int(port)), ANSWER_TIMEOUT_S).close()
        except OSError as error:
            raise ConnectionError(f"{address}: {error.strerror or error}") from error
        self._channel = DealerChannel(context, address, HighWaterMark.BLOCK_LINK, keys)
        self._poller = zmq.Poller()
        self._poller.register(self._channel.socket, zmq.POLLIN)
        self._poller.register(self._channel.monitor, zmq.POLLIN)
        try:
            while not self._is_connected:
                self._wait(deadline)
        except OSError:
            self.close()
            raise

    @property
    def is_at_rest(self) -> bool:
        """True if it is connected, and every request has been answered."""
        with contextlib.suppress(ConnectionError):
            self._follow_link()
            return self._is_connected and not self._expected
        return False

    def find(self, keys: Sequence[bytes]) -> bytes:
        """Return a byte for each key, which is 1 if the block is probably stored there."""
        self._send(HaveBlocks(next(self._numbers), self._layout, self._rank, list(keys)))
        answer = self._receive(time.monotonic() + ANSWER_TIMEOUT_S)
        if not isinstance(answer, BlocksHad) or len(answer.are_there) != len(keys):
            raise ConnectionError(f"{self.address} sent an unexpected answer")
        return answer.are_there

    def read(self, wanted: Sequence[Wanted], limit: float) -> Iterator[Outcome]:
        """Read blocks one by one, filling each one's memory right before its outcome is yielded.

        Parts are requested ahead, but are held only by the server and in the window of the
        connection. Several blocks may therefore share the same memory. Reading ends at `limit`, in
        seconds of `time.monotonic`.
        """
        ahead = _Ahead(wanted)
        for number, (key, block) in enumerate(wanted):
            unpacking = Unpacking(key, block)
            num_bytes, outcome = unpacking.num_bytes, Outcome.READ
            left = deque(_part_sizes(num_bytes))
            while left:
                for asked_key, start in ahead.take():
                    self._ask_for(asked_key, start)
                answer = self._receive_content(limit)
                if answer is None:
                    return
                part_bytes = left.popleft()
                ahead.answered(part_bytes)
                if outcome is not Outcome.READ:
                    continue
                if not answer.num_bytes:
                    outcome = Outcome.NOT_THERE
                elif (answer.num_bytes, len(answer.content)) != (num_bytes, part_bytes):
                    outcome = Outcome.DAMAGED
                else:
                    unpacking.add(answer.content)
                    continue
                for _ in range(ahead.drop(number)):
                    left.pop()
            if outcome is Outcome.READ and not unpacking.is_intact:
                outcome = Outcome.DAMAGED
            yield outcome

    def _receive_content(self, limit: float) -> BlockContent | None:
        """Return the next part; None: the limit has been reached."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        try:
            answer = self._receive(min(limit, deadline))
        except TimeoutError:
            if limit < deadline:  # the server may be well
                return None
            raise
        if not isinstance(answer, BlockContent):
            raise ConnectionError(f"{self.address} sent an unexpected answer")
        return answer

    def _ask_for(self, key: bytes, start: int) -> None:
        self._send(ReadBlock(next(self._numbers), self._layout, self._rank, key, start))

    def _send(self, request: HaveBlocks | ReadBlock) -> None:
        if not self._channel.send(NO_EPOCH, encode(request)):
            raise ConnectionError(f"{self.address} accepts no requests")
        self._expected.append(request.number)

    def _receive(self, deadline: float) -> FromBlockServer:
        """Return the answer to the oldest request."""
        while True:
            self._follow_link()
            for received in self._channel.drain(1):
                try:
                    answer = decode_from_server(received.body)
                except ProtocolError as error:
                    raise ConnectionError(f"{self.address}: {error}") from error
                if answer.number != self._expected.popleft():
                    raise ConnectionError(f"{self.address} omitted an answer")
                return answer
            if self._channel.take_loss():
                raise ConnectionError(f"a message of {self.address} was lost")
            self._wait(deadline)

    def _wait(self, deadline: float) -> None:
        left_ms = int((deadline - time.monotonic()) * 1000)
        if left_ms <= 0 or not self._poller.poll(left_ms):
            raise TimeoutError(f"{self.address} does not answer in time")
        self._follow_link()

    def _follow_link(self) -> None:
        for event in self._channel.link_events():
            if self._is_connected:  # requests without an answer will get none
                self._is_connected = False
                raise ConnectionError(f"{self.address} has disconnected")
            self._is_connected = event is LinkEvent.CONNECTED

    def close(self) -> None:
        self._channel.close()


def _part_sizes(num_bytes: int) -> list[int]:
    """Return the sizes of the parts of a file."""
    num_whole, rest = divmod(num_bytes, PART_BYTES)
    return [PART_BYTES] * num_whole + [rest] * (rest > 0)


class _Ahead:
    """The parts to request next, within the bounds for parts in transit."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._parts = deque(
            (number, key, index * PART_BYTES, part_bytes)
            for number, (key, block) in enumerate(wanted)
            for index, part_bytes in enumerate(_part_sizes(file_bytes(block)))
        )
        """Parts not yet requested: block number, key, first byte and size."""
        self._num_bytes = self._num_answers = 0
        """Parts in transit."""

    def take(self) -> Iterator[tuple[bytes, int]]:
        """Yield the keys and first bytes of the parts to request now."""
        while self._parts and self._num_answers < MAX_WINDOW:
            _, key, start, part_bytes = self._parts[0]
            if self._num_bytes + part_bytes > WINDOW_BYTES:
                return
            self._parts.popleft()
            self._num_bytes += part_bytes
            self._num_answers += 1
            yield key, start

    def drop(self, number: int) -> int:
        """Request no further parts of a block; return the number of parts that were dropped."""
        num_parts = 0
        while self._parts and self._parts[0][0] == number:
            self._parts.popleft()
            num_parts += 1
        return num_parts

    def answered(self, part_bytes: int) -> None:
        self._num_bytes -= part_bytes
        self._num_answers -= 1
