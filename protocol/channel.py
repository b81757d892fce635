"""Sockets: the only file that knows ZMQ options, addresses and frames.

Binding sides are ROUTERs, connecting sides DEALERs with a random identity per incarnation. Every
socket has LINGER 0, a high-water mark and a largest message; nothing here ever blocks.

What arrives is checked: frames that were harmed on the way, or come again, or after one that is
missing, are dropped here (protocol/frame_sequence.py), and the connecting end is told by `take_loss` that
it must begin anew. Frames on the lifecycle link stand for themselves: there a gap is passed over.
"""

import contextlib
import enum
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zmq

from protocol import multipart
from protocol.frame_sequence import Flag, FrameSequence, Verdict
from protocol.message import DamagedFrame, Header, ProtocolError, pack_header, unpack_header
from protocol.runtime import SocketFactory

MAX_FRAME_BYTES = 16 * 2**20
_RECONNECT_MS = 10
"""And up to as much again. Not more after many tries: a new core would wait for its worker."""
_HANDSHAKE_MS = 2000
_NO_EPOCH = 0
_FEW_PEERS = 64
_BEGINS = int(Flag.BEGINS)
_MARKS = int(Flag.BEAT | Flag.LOST)
_READABLE = int(zmq.POLLIN)
_MONITOR_EVENT = struct.Struct("=Hi")
"""Event and value, as libzmq's monitor sockets send them."""


class HighWaterMark(enum.IntEnum):
    """Messages queued per peer and direction before a send is refused."""

    CLIENT_LINK = 4096
    WORKER_LINK = 64
    LIFECYCLE_LINK = 1024


class PeerGone(Exception):
    """The peer addressed is not connected any more."""


class FrameTooLarge(Exception):
    """A body of more than `MAX_FRAME_BYTES`: its receiver would close the connection for good."""


class LinkEvent(enum.Enum):
    """What happened to a connection."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"


class Received(NamedTuple):
    """One message as it came from the wire."""

    peer: bytes
    """Identity of the sender; empty on connecting sockets, which have one peer."""
    header: Header
    body: bytes


class BadFrame(NamedTuple):
    """A message that was dropped because it could not be read."""

    peer: bytes
    """Identity of the sender; empty on connecting sockets."""
    reason: str


def client_address(run_dir: str) -> str:
    """Where the core listens for clients."""
    return f"ipc://{run_dir}/core.sock"


def worker_address(run_dir: str) -> str:
    """Where the core listens for workers."""
    return f"ipc://{run_dir}/workers.sock"


def lifecycle_address(run_dir: str) -> str:
    """Where the supervisor listens."""
    return f"ipc://{run_dir}/supervisor.sock"


def _configure(socket: zmq.Socket[bytes], hwm: HighWaterMark) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, int(hwm))
    socket.setsockopt(zmq.RCVHWM, int(hwm))
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


@contextlib.contextmanager
def _closed_on_error(socket: zmq.Socket[bytes]) -> Iterator[None]:
    """What was opened halfway is not left to the garbage collector."""
    try:
        yield
    except BaseException:
        socket.close(linger=0)
        raise


def _check_size(body: bytes) -> None:
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"body of {len(body)} bytes exceeds the {MAX_FRAME_BYTES} of a frame")


class _Channel:
    """What both kinds of sockets share: polling, bounded draining, closing."""

    _names_peers: bool
    """Whether each message comes with its sender's identity in front."""

    def __init__(self, socket: zmq.Socket[bytes], hwm: HighWaterMark) -> None:
        self.socket = socket
        self._takes_gaps = hwm is HighWaterMark.LIFECYCLE_LINK
        self.num_read = 0
        """Frames that have come, whatever became of them."""
        self.num_dropped_frames = 0
        """Those that were harmed on the way, came again, or came after a gap."""
        self.num_bad_frames = 0
        """Messages dropped because they could not be read."""
        self.last_bad_frame: BadFrame | None = None

    @property
    def fd(self) -> int:
        """Edge-triggered descriptor for event loops: drain after every wake-up and every send."""
        return int(self.socket.getsockopt(zmq.FD))

    def drain(self, limit: int) -> Iterator[Received]:
        """Yield the messages that have arrived, at most `limit`; unreadable ones are counted."""
        for _ in range(limit):
            parts = multipart.receive(self.socket)
            if parts is None:
                return
            self.num_read += 1
            peer = parts.pop(0) if self._names_peers else b""
            try:
                received = _unpack(peer, parts)
            except DamagedFrame:
                self.num_dropped_frames += 1
                self._on_loss(peer)
            except ProtocolError as problem:
                self.count_bad_frame(peer, str(problem))
            else:
                if self._is_due(received):
                    yield received

    def _is_due(self, received: Received) -> bool:
        """Whether it is a message, and neither comes again nor after a gap."""
        verdict = self._sequence(received.peer).judge(received.header)
        if verdict is Verdict.NEXT:
            return not received.header.flags or self._is_message(received.header)
        self.num_dropped_frames += 1
        if verdict is Verdict.AFTER_A_GAP:
            self._on_loss(received.peer)
        return False

    def _is_message(self, header: Header) -> bool:
        """Heed the flags of a frame that has some."""
        if header.flags & _BEGINS:
            self._on_beginning()
        if header.flags & _MARKS:
            self._on_mark(header)
            return False
        return True

    def _sequence(self, peer: bytes) -> FrameSequence:
        raise NotImplementedError

    def _on_loss(self, peer: bytes) -> None:
        """A frame was harmed, or is missing."""
        raise NotImplementedError

    def _on_beginning(self) -> None:
        """The other end waits for nothing before this frame, and neither does this one."""

    def _on_mark(self, header: Header) -> None:
        """A frame without a message has come."""

    def count_bad_frame(self, peer: bytes, reason: str) -> None:
        """Count a message that was dropped: by `drain`, or by whoever could not decode its body."""
        self.num_bad_frames += 1
        self.last_bad_frame = BadFrame(peer, reason)

    def close(self) -> None:
        """Close the socket; queued messages are dropped."""
        self.socket.close(linger=0)


def _unpack(peer: bytes, parts: list[bytes]) -> Received:
    if len(parts) != 2:
        raise DamagedFrame("message does not have the two parts header and body")
    return Received(peer, unpack_header(parts[0], parts[1]), parts[1])


class RouterChannel(_Channel):
    """The binding side of a link, with any number of peers."""

    _names_peers = True

    def __init__(self, context: SocketFactory, address: str, hwm: HighWaterMark):
        """Bind to `address`; a socket file left by a dead predecessor is replaced."""
        socket = context.socket(zmq.ROUTER)
        with _closed_on_error(socket):
            _configure(socket, hwm)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # A peer that connects anew before its lost connection was read to the end would not be
            # heard again, ever. Nobody else knows its random identity, and so can take its place.
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
            socket.bind(address)
        super().__init__(socket, hwm)
        self._sequences: dict[bytes, FrameSequence] = {}
        self._num_peers_looked_over = _FEW_PEERS
        """So many have to be known before it is asked again who of them is gone."""
        self._first_seq = 0
        """Of a new sequence: what goes to a peer that was forgotten does not look repeated."""

    def send(self, peer: bytes, epoch: int, body: bytes) -> bool:
        """Send one message.

        Returns:
            False if the peer's queue is full.

        Raises:
            PeerGone: the peer is not connected.
            FrameTooLarge: the peer could not receive it; nothing was sent.
        """
        return self._send(peer, epoch, body)

    def _send(self, peer: bytes, epoch: int, body: bytes, flags: int = 0) -> bool:
        _check_size(body)
        sequence = self._sequence(peer)
        if sequence.owes_beginning:
            flags |= _BEGINS
        header = pack_header(epoch, sequence.next_seq, body, flags)
        try:
            multipart.send(self.socket, [peer, header, body])
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                self.forget(peer)
                raise PeerGone(peer.hex()) from error
            raise
        sequence.next_seq += 1
        sequence.owes_beginning = False
        return True

    def beat(self) -> None:
        """To be called about once a second: what was lost last on a link shows in the answers."""
        for peer in list(self._sequences):
            self._send_mark(peer, Flag.BEAT)

    def forget(self, peer: bytes) -> None:
        """Drop what is counted for a peer that is gone."""
        if peer in self._sequences:
            self._first_seq = max(self._first_seq, self._sequences.pop(peer).next_seq)

    def _sequence(self, peer: bytes) -> FrameSequence:
        sequence = self._sequences.get(peer)
        if sequence is None:
            if len(self._sequences) >= self._num_peers_looked_over:
                self.beat()  # who is gone is forgotten
                self._num_peers_looked_over = 2 * len(self._sequences) + _FEW_PEERS
            sequence = FrameSequence(takes_gaps=self._takes_gaps, first_seq=self._first_seq)
            self._sequences[peer] = sequence
        return sequence

    def _on_loss(self, peer: bytes) -> None:
        if not self._takes_gaps:
            self._send_mark(peer, Flag.LOST)

    def _send_mark(self, peer: bytes, flag: Flag) -> None:
        with contextlib.suppress(PeerGone):
            self._send(peer, _NO_EPOCH, b"", flag)


class DealerChannel(_Channel):
    """The connecting side of a link; it reconnects by itself and says when."""

    _names_peers = False

    def __init__(self, context: SocketFactory, address: str, hwm: HighWaterMark):
        """Start connecting to `address`; nobody needs to listen there yet."""
        socket = context.socket(zmq.DEALER)
        with _closed_on_error(socket):
            _configure(socket, hwm)
            socket.setsockopt(zmq.IDENTITY, b"T" + secrets.token_bytes(15))
            socket.setsockopt(zmq.IMMEDIATE, 1)
            socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
            self.monitor = socket.get_monitor_socket(
                zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
            )
            with _closed_on_error(self.monitor):
                socket.connect(address)
        super().__init__(socket, hwm)
        self._frames = FrameSequence(takes_gaps=self._takes_gaps)
        self._has_lost = False
        self._is_new = True

    def link_events(self) -> list[LinkEvent]:
        """Connections made and lost since the last call, in order."""
        events = []
        while int(self.monitor.getsockopt(zmq.EVENTS)) & _READABLE:
            what, _address = self.monitor.recv_multipart(zmq.NOBLOCK)
            connected = _MONITOR_EVENT.unpack(what)[0] == zmq.Event.HANDSHAKE_SUCCEEDED
            self._leave_connection()
            events.append(LinkEvent.CONNECTED if connected else LinkEvent.DISCONNECTED)
        return events

    def _leave_connection(self) -> None:
        """What is unread came over the last connection: over a new one nobody speaks unasked."""
        while multipart.receive(self.socket) is not None:
            self.num_read += 1
            self.num_dropped_frames += 1
        self._frames.reconnected()
        self._has_lost = False
        self._is_new = True

    def send(self, epoch: int, body: bytes, *, begins: bool = False) -> bool:
        """Send one message; False if nobody is connected or the queue is full.

        Args:
            begins: nothing before it is waited for any more, neither there nor here. The first
                message of a connection always begins.

        Raises:
            FrameTooLarge: the other side could not receive it; nothing was sent.
        """
        return self._send(epoch, body, _BEGINS if begins else 0)

    def take_loss(self) -> bool:
        """Whether a frame of either direction was lost since the last call: begin anew then."""
        has_lost, self._has_lost = self._has_lost, False
        return has_lost

    def _send(self, epoch: int, body: bytes, flags: int) -> bool:
        _check_size(body)
        if self._is_new:
            flags |= _BEGINS
        header = pack_header(epoch, self._frames.next_seq, body, flags)
        try:
            multipart.send(self.socket, [header, body])
        except zmq.Again:
            return False
        self._frames.next_seq += 1
        self._is_new = False
        return True

    def _sequence(self, peer: bytes) -> FrameSequence:
        return self._frames

    def _on_loss(self, peer: bytes) -> None:
        self._has_lost = not self._takes_gaps

    def _on_beginning(self) -> None:
        self._has_lost = False  # what was lost, or said to be, came before

    def _on_mark(self, header: Header) -> None:
        if header.flags & Flag.LOST:
            self._has_lost = True
        else:
            self._send(header.epoch, b"", Flag.BEAT)

    def close(self) -> None:
        """Close both sockets; queued messages are dropped."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        super().close()
