"""The sockets of the links: each frame once and in order, and a new beginning after a loss.

Theory of operation. Binding sides are ROUTERs, connecting sides DEALERs with a random identity per
incarnation. Every socket has LINGER 0, a high-water mark and a largest message; no call blocks.

A connection is in one of two states. *In step*: each frame that arrives has the next number, and
is delivered. *Lost*: a frame was damaged or is missing; every later frame is dropped until one with
the flag BEGINS. A `FrameSequence` (frame_sequence.py) per peer tracks the numbers. Only the
connecting side can leave the lost state, because it knows which messages must be sent again:

1. If the binding side finds a loss, it sends LOST. If the connecting side finds one, or receives
   LOST, `take_loss` returns True once. The loss of a last frame is found at the next BEAT.
2. The caller of `take_loss` sends its first message with `begins=True` (Connect, WorkerHello).
3. The binding side accepts that frame whatever its number, and its next frame has BEGINS too.

Invariants: a frame is delivered at most once and in order; between two BEGINS no frame is missing;
numbers that a connecting side sends never go back. A frame of another version of the protocol is
answered with a BEAT by the binding side, so that both ends can report both versions. On the
lifecycle link each message is complete in itself and repeated by its sender, so gaps are ignored
there and only damaged and repeated frames are dropped.

Callers must keep this order: after a wake-up, `link_events` before `drain`, because a reconnection
discards unread frames; `drain` after every send, because the descriptor is edge-triggered and a
send may consume the event of an arrival; `beat` about once a second on binding sides.
"""

import contextlib
import enum
import os
import secrets
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import zmq

from protocol.config.addresses import check_tcp_address, is_remote
from protocol.message import (
    NO_EPOCH,
    DamagedFrame,
    Header,
    OtherVersion,
    ProtocolError,
    pack_header,
    unpack_header,
)
from protocol.transport import multipart
from protocol.transport.curve import ClientKeys, ServerKeys
from protocol.transport.frame_sequence import Flag, FrameOrder, FrameSequence
from protocol.transport.runtime import SocketFactory

MAX_FRAME_BYTES = 16 * 2**20
_TRANSPORTS = ("ipc://", "tcp://", "inproc://")
_RECONNECT_MS = 10
"""Plus a random part of the same size. No backoff: a new core would wait for its worker."""
_HANDSHAKE_MS = 2000
_REMOTE_RECONNECT_MS = 200
"""Reconnect interval between machines, one of which may be away for long or refuse the key."""
_HEARTBEAT_MS = 500
_SILENCE_MS = 2000
"""Silence after which a connection between machines ends."""
_HANDSHAKE_PROBLEM = "what answers there has another server.key, or is not an engine"
_PROBLEMS = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the key of this client is unknown there",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: _HANDSHAKE_PROBLEM,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: (
        "what answers there has ended the connection before both had their keys: it is being"
        " restarted, is not an engine, or has another server.key"
    ),
}
_FEW_PEERS = 64
_BEGINS = int(Flag.BEGINS)
_EMPTY = int(Flag.BEAT | Flag.LOST)
_READABLE = int(zmq.POLLIN)
_MONITOR_EVENT = struct.Struct("=Hi")
"""Event and value, as libzmq's monitor sockets send them."""


class HighWaterMark(enum.IntEnum):
    """Messages queued per peer and direction before a send is refused."""

    CLIENT_LINK = 4096
    WORKER_LINK = 64
    BLOCK_LINK = 72
    LIFECYCLE_LINK = 1024


class PeerGone(Exception):
    """The peer is not connected."""


class FrameTooLarge(Exception):
    """A body has more than `MAX_FRAME_BYTES`: its receiver would close the connection for good."""


class LinkEvent(enum.Enum):
    """A change of a connection."""

    CONNECTED = "connected"
    DISCONNECTED = "disconnected"


class Received(NamedTuple):
    """One message from the wire."""

    peer: bytes
    """Identity of the sender; empty on connecting sockets."""
    header: Header
    body: bytes


class BadFrame(NamedTuple):
    """A message that was dropped because it could not be decoded."""

    peer: bytes
    reason: str


def _has_file(address: str) -> bool:
    return os.path.exists(address.removeprefix("ipc://"))


def _notice_silence(socket: zmq.Socket[bytes]) -> None:
    """Let a connection end when the other machine is silent: it may have gone unnoticed."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENCE_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _SILENCE_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _SILENCE_MS)


def _configure(socket: zmq.Socket[bytes], hwm: HighWaterMark) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, int(hwm))
    socket.setsockopt(zmq.RCVHWM, int(hwm))
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)


@contextlib.contextmanager
def _closed_on_error(socket: zmq.Socket[bytes]) -> Iterator[None]:
    try:
        yield
    except BaseException:
        socket.close(linger=0)
        raise


def _frame(epoch: int, seq: int, body: bytes, flags: int) -> list[bytes]:
    """Return the header and the body of a frame."""
    if len(body) > MAX_FRAME_BYTES:
        raise FrameTooLarge(f"body of {len(body)} bytes exceeds the {MAX_FRAME_BYTES} of a frame")
    return [pack_header(epoch, seq, body, flags), body]


class _Channel:
    """Common part of both kinds of sockets: polling, bounded draining, closing."""

    _names_peers: bool
    """Whether each message begins with its sender's identity."""

    def __init__(self, socket: zmq.Socket[bytes], hwm: HighWaterMark) -> None:
        self.socket = socket
        self._ignores_gaps = hwm is HighWaterMark.LIFECYCLE_LINK
        self.num_read = 0
        """Frames that have arrived, dropped ones included."""
        self.num_dropped_frames = 0
        """Frames that were damaged, repeated, or came after a gap."""
        self.num_bad_frames = 0
        self.last_bad_frame: BadFrame | None = None

    @property
    def fd(self) -> int:
        """Edge-triggered descriptor for event loops: drain after every wake-up and every send."""
        return int(self.socket.getsockopt(zmq.FD))

    def drain(self, limit: int) -> Iterator[Received]:
        """Yield the messages that have arrived, at most `limit`; bad ones are only counted."""
        for _ in range(limit):
            parts = multipart.receive(self.socket)
            if parts is None:
                return
            self.num_read += 1
            peer = parts.pop(0) if self._names_peers else b""
            try:
                if len(parts) != 2:
                    raise DamagedFrame("message does not have the two parts header and body")
                header = unpack_header(parts[0], parts[1])
            except DamagedFrame:
                self.num_dropped_frames += 1
                self._on_loss(peer)
            except ProtocolError as problem:
                self.count_bad_frame(peer, str(problem))
                if isinstance(problem, OtherVersion):
                    self._on_other_version(peer)
            else:
                if self._is_message(peer, header):
                    yield Received(peer, header, parts[1])

    def _is_message(self, peer: bytes, header: Header) -> bool:
        """Return whether a frame carries a message and is neither repeated nor after a gap."""
        order = self._sequence(peer).check(header)
        if order is FrameOrder.NEXT:
            if header.flags:
                self._on_flags(header)
            return not header.flags & _EMPTY
        self.num_dropped_frames += 1
        if order is FrameOrder.AFTER_A_GAP:
            self._on_loss(peer)
        return False

    def _sequence(self, peer: bytes) -> FrameSequence:
        raise NotImplementedError

    def _on_loss(self, peer: bytes) -> None:
        """A frame was damaged, or is missing."""
        raise NotImplementedError

    def _on_other_version(self, peer: bytes) -> None:
        """Handle a frame of another version of the protocol; by default nothing is sent."""

    def _on_flags(self, header: Header) -> None:
        """The next frame has arrived, and has flags."""

    def count_bad_frame(self, peer: bytes, reason: str) -> None:
        """Count a dropped message; callers whose decoder rejects a body count it here too."""
        self.num_bad_frames += 1
        self.last_bad_frame = BadFrame(peer, reason)

    def close(self) -> None:
        """Close the socket; queued messages are dropped."""
        self.socket.close(linger=0)


class RouterChannel(_Channel):
    """The binding side of a link, with any number of peers."""

    _names_peers = True

    def __init__(self, context: SocketFactory, address: str, hwm: HighWaterMark):
        """Bind to `address`; a socket file left by a dead predecessor is replaced."""
        socket = context.socket(zmq.ROUTER)
        with _closed_on_error(socket):
            _configure(socket, hwm)
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            # Without this, a peer that reconnects before its lost connection was read to the end
            # stays unreachable for good. Its identity is random, so no other peer can take it over.
            socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)
            socket.bind(address)
        super().__init__(socket, hwm)
        self._address = address
        self._has_file = _has_file(address)
        self._sequences: dict[bytes, FrameSequence] = {}
        self._sweep_at = _FEW_PEERS
        """Number of peers at which those that are gone are looked for."""
        self._first_seq = 0
        """First number of a new sequence: frames to a forgotten peer must not look repeated."""

    def keep_listening(self) -> bool:
        """Bind again if the socket file was removed; returns whether it was.

        Connections stay: they do not need the file. OSError: its directory was removed, too.
        """
        if not self._has_file or _has_file(self._address):
            return False
        is_curve = self.socket.getsockopt(zmq.CURVE_SERVER)
        try:
            self.socket.setsockopt(zmq.CURVE_SERVER, 0)  # keys are for what `listen` has bound
            self.socket.bind(self._address)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from error
        finally:
            self.socket.setsockopt(zmq.CURVE_SERVER, is_curve)
        return True

    def listen(self, address: str, keys: ServerKeys) -> None:
        """Bind to a tcp address, where every connection is encrypted and has a known key.

        There has to be a `ClientAuthenticator`. What was bound before stays as it was.
        """
        self.socket.setsockopt(zmq.CURVE_SERVER, 1)
        self.socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        self.socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        _notice_silence(self.socket)
        self.socket.bind(address)

    def send(self, peer: bytes, epoch: int, body: bytes) -> bool:
        """Send one message, or raise PeerGone or FrameTooLarge; False: the peer's queue is full."""
        return self._send(peer, epoch, body)

    def _send(self, peer: bytes, epoch: int, body: bytes, flags: int = 0) -> bool:
        sequence = self._sequence(peer)
        if sequence.owes_beginning:
            flags |= _BEGINS
        frame = _frame(epoch, sequence.next_seq, body, flags)
        try:
            multipart.send(self.socket, [peer, *frame])
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
        """Send a BEAT to every peer: the answers reveal whether the last frames were lost."""
        for peer in list(self._sequences):
            self._send_empty(peer, Flag.BEAT)

    def forget(self, peer: bytes) -> None:
        """Drop the sequence of a peer that is gone."""
        if peer in self._sequences:
            self._first_seq = max(self._first_seq, self._sequences.pop(peer).next_seq)

    def _sequence(self, peer: bytes) -> FrameSequence:
        sequence = self._sequences.get(peer)
        if sequence is None:
            if len(self._sequences) >= self._sweep_at:
                self.beat()  # peers that are gone are forgotten
                self._sweep_at = 2 * len(self._sequences) + _FEW_PEERS
            sequence = FrameSequence(ignores_gaps=self._ignores_gaps, first_seq=self._first_seq)
            self._sequences[peer] = sequence
        return sequence

    def _on_loss(self, peer: bytes) -> None:
        if not self._ignores_gaps:
            self._send_empty(peer, Flag.LOST)

    def _on_other_version(self, peer: bytes) -> None:
        """Answer with a frame: its header has this version, which the peer can report."""
        self._send_empty(peer, Flag.BEAT)

    def _send_empty(self, peer: bytes, flag: Flag) -> None:
        with contextlib.suppress(PeerGone):
            self._send(peer, NO_EPOCH, b"", flag)


def check_address(address: str, keys: ClientKeys | None) -> None:
    """Raise a ValueError, which users are shown, if a link cannot connect to an address."""
    if not address.startswith(_TRANSPORTS):
        raise ValueError(f"the address {address[:64]!r} must begin with ipc:// or tcp://")
    if is_remote(address):
        check_tcp_address(address)
        if keys is None:
            raise ValueError(f"{address} needs CURVE keys: a tcp address is never used without")


class DealerChannel(_Channel):
    """The connecting side of a link; it reconnects by itself and reports when."""

    _names_peers = False

    def __init__(
        self,
        context: SocketFactory,
        address: str,
        hwm: HighWaterMark,
        keys: ClientKeys | None = None,
    ):
        """Start connecting to `address`; the binding side may come later.

        ValueError: a tcp address has no keys, or it is not an address.
        """
        check_address(address, keys)
        socket = context.socket(zmq.DEALER)
        with _closed_on_error(socket):
            _configure(socket, hwm)
            if keys is not None and is_remote(address):
                socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
                socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
                socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
                _notice_silence(socket)
            socket.setsockopt(zmq.IDENTITY, b"T" + secrets.token_bytes(15))
            socket.setsockopt(zmq.IMMEDIATE, 1)
            remote = is_remote(address)
            socket.setsockopt(zmq.RECONNECT_IVL, _REMOTE_RECONNECT_MS if remote else _RECONNECT_MS)
            watched = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED
            self.monitor = socket.get_monitor_socket(sum(_PROBLEMS, watched))
            with _closed_on_error(self.monitor):
                socket.connect(address)
        super().__init__(socket, hwm)
        self._frames = FrameSequence(ignores_gaps=self._ignores_gaps)
        self._has_lost = False
        self._is_new = True
        self._address = address
        self.problem = ""
        """Why there is no connection, if the other end has refused one."""

    def link_events(self) -> list[LinkEvent]:
        """Return the connections made and lost since the last call, in order."""
        events = []
        while int(self.monitor.getsockopt(zmq.EVENTS)) & _READABLE:
            what, _address = self.monitor.recv_multipart(zmq.NOBLOCK)
            event = _MONITOR_EVENT.unpack(what)[0]
            if event in _PROBLEMS:
                self.problem = _PROBLEMS[event]
                continue
            connected = event == zmq.Event.HANDSHAKE_SUCCEEDED
            if connected:
                self.problem = ""
            self._leave_connection()
            events.append(LinkEvent.CONNECTED if connected else LinkEvent.DISCONNECTED)
        return events

    def reconnect(self) -> None:
        """Connect anew: libzmq does not try again where the other end has refused the key."""
        with contextlib.suppress(zmq.ZMQError):  # there is no connection to end
            self.socket.disconnect(self._address)
        self.socket.connect(self._address)

    def _leave_connection(self) -> None:
        """Discard unread frames of the last connection: over a new one the peer only answers."""
        while multipart.receive(self.socket) is not None:
            self.num_read += 1
            self.num_dropped_frames += 1
        self._frames.reconnected()
        self._has_lost = False
        self._is_new = True

    def send(self, epoch: int, body: bytes, *, begins: bool = False) -> bool:
        """Send one message, or raise FrameTooLarge; False if no connection has room for it.

        `begins` ends the lost state; the first message of a connection always does.
        """
        return self._send(epoch, body, _BEGINS if begins else 0)

    def take_loss(self) -> bool:
        """Return whether a frame of either direction was lost since the last call."""
        has_lost, self._has_lost = self._has_lost, False
        return has_lost

    def _send(self, epoch: int, body: bytes, flags: int) -> bool:
        if self._is_new:
            flags |= _BEGINS
        try:
            multipart.send(self.socket, _frame(epoch, self._frames.next_seq, body, flags))
        except zmq.Again:
            return False
        self._frames.next_seq += 1
        self._is_new = False
        return True

    def _sequence(self, peer: bytes) -> FrameSequence:
        return self._frames

    def _on_loss(self, peer: bytes) -> None:
        self._has_lost = not self._ignores_gaps

    def _on_flags(self, header: Header) -> None:
        if header.flags & _BEGINS:
            self._has_lost = False  # losses, and LOST, came before it
        if header.flags & Flag.LOST:
            self._has_lost = True
        elif header.flags & Flag.BEAT:
            self._send(header.epoch, b"", Flag.BEAT)

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(linger=0)
        super().close()
