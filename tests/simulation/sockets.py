"""Simulated ZeroMQ: contexts and sockets for the real channels."""

from collections import deque
from typing import Any, cast

import zmq

from protocol.transport.runtime import SocketFactory
from tests.simulation.wire import Endpoint, Parts, Wire
from tests.simulation.world import Process

_READABLE = int(zmq.POLLIN)
_WRITABLE = int(zmq.POLLOUT)
_EVENTS = int(zmq.EVENTS)
_MORE = int(zmq.SNDMORE)


class _Again(zmq.Again):
    """A `zmq.Again` that does not look up its error text."""

    errno = zmq.EAGAIN
    __init__ = Exception.__init__


def epoch_of(header: bytes) -> int:
    """Return the epoch of a header, which may be damaged; -1 without one."""
    return int.from_bytes(header[4:8], "little") if header else -1


class WouldWait(Exception):
    """A poll has found nothing: its caller repeats it in the next turn."""


class SimulatedContext:
    """A `zmq.Context` of one process."""

    def __init__(self, wire: Wire, owner: Process) -> None:
        self._wire = wire
        self._owner = owner

    def socket(self, kind: int) -> "SimulatedSocket":
        """Create a ROUTER or a DEALER."""
        return SimulatedSocket(self._wire, self._owner, kind)

    def term(self) -> None:
        """Do nothing."""

    def destroy(self, linger: int | None = None) -> None:
        """Do nothing."""


def make_context(wire: Wire, owner: Process) -> SocketFactory:
    """Return a `SimulatedContext` under the type that the channels take."""
    return cast(SocketFactory, SimulatedContext(wire, owner))


class _Part:
    """As much of a `zmq.Frame` as the channels read."""

    __slots__ = ("bytes", "more")

    def __init__(self, part: bytes, more: bool) -> None:
        self.bytes = part
        self.more = more


class _Monitor:
    """The monitor socket of a DEALER: connections made and lost."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.events: deque[bytes] = deque()

    def getsockopt(self, option: int) -> int:
        if option == zmq.FD:
            return self.fd
        return int(bool(self.events))

    def recv_multipart(self, flags: int = 0) -> Parts:
        return [self.events.popleft(), b""]

    def close(self, linger: int = 0) -> None:
        self.events.clear()


class SimulatedSocket(Endpoint):
    """As much of a `zmq.Socket` as the channels use."""

    def __init__(self, wire: Wire, owner: Process, kind: int) -> None:
        super().__init__(owner, wire.world.new_fd())
        self.kind = kind
        self.monitor: _Monitor | None = None
        self._header_read = self._header_sent = b""
        """The header of the last message; beats do not count."""
        self._wire = wire
        self._hwm = 0
        self._is_router = kind == zmq.ROUTER
        self._unread: Parts = []
        """The rest of the message that is being read, last part first."""
        self._unsent: Parts = []
        """The first parts of the message that is being written."""
        owner.on_death.append(self.close)

    @property
    def last_epoch_read(self) -> int:
        return epoch_of(self._header_read)

    @property
    def last_epoch_sent(self) -> int:
        return epoch_of(self._header_sent)

    def setsockopt(self, option: int, value: Any) -> None:
        """Keep the options that matter here; the world draws the random part of an identity."""
        if option == zmq.IDENTITY:
            self.identity = value[:1] + self._wire.world.rng.randbytes(len(value) - 1)
        elif option in (zmq.SNDHWM, zmq.RCVHWM):
            self._hwm += value

    def getsockopt(self, option: int) -> int:
        """Return the descriptor, or whether a message can be read."""
        return (_READABLE if self.inbox else 0) if option == _EVENTS else self.fd

    def bind(self, address: str) -> None:
        self.address = address
        self._wire.listeners[address] = self

    def connect(self, address: str) -> None:
        self.address = address
        self._wire.connect(self)

    def get_monitor_socket(self, events: int) -> _Monitor:
        self.monitor = _Monitor(self._wire.world.new_fd())
        return self.monitor

    def disable_monitor(self) -> None:
        """Do nothing."""

    def poll(self, timeout: int = 0, flags: int = zmq.POLLIN) -> int:
        """Return which of `flags` are possible now, on a DEALER.

        Raises:
            WouldWait: no message can be read yet.
        """
        if flags == _READABLE and not self.inbox:
            raise WouldWait
        can_send = any(lane.num_pending < self._hwm for lane in self.lanes.values())
        return int(flags) & ((_READABLE if self.inbox else 0) | (_WRITABLE if can_send else 0))

    def send(self, part: bytes, flags: int) -> None:
        """Collect the parts of a message and send it with the last one.

        A ROUTER sends it to the peer that the first part names.
        """
        self._unsent.append(part)
        if not flags & _MORE:
            parts, self._unsent = self._unsent, []
            self._send(parts)

    def recv(self, flags: int, *, copy: bool) -> _Part:
        """Return the next part of a message; there must be one."""
        unread = self._unread
        if not unread:
            lane, parts = self.inbox.popleft()
            lane.num_pending -= 1
            if len(parts) > 1 and parts[1]:
                self._header_read = parts[0]
            unread += parts[::-1]
            if self._is_router:
                unread.append(lane.connection.dealer.identity)
        part = unread.pop()
        return _Part(part, bool(unread))

    def _send(self, parts: Parts) -> None:
        if self._is_router:
            lane = self.lanes.get(parts[0])
            if lane is None:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            parts = parts[1:]
        else:
            lane = self.lanes.get(b"")
            if lane is None:
                raise _Again
        if lane.num_pending >= self._hwm:
            raise _Again
        if parts[1]:
            self._header_sent = parts[0]
        self.owner.busy_until += 3
        # A message that is sent before the end of a connection is noticed is lost.
        if lane.connection.is_up and not (
            self._wire.is_harmful and self._wire.is_harmed(lane, parts)
        ):
            lane.deliver_later(parts)

    def link_event(self, event: int) -> None:
        """Queue an event for the monitor."""
        if self.monitor is not None:
            self.monitor.events.append(int(event).to_bytes(2, "little") + bytes(4))
            self.owner.arrived(self.monitor.fd)

    def close(self, linger: int = 0) -> None:
        """Close the socket; its peers notice later."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._wire.listeners.get(self.address) is self:
            del self._wire.listeners[self.address]
        mine = [*self.peers.values(), *([self.connection] if self.connection else [])]
        for connection in mine:
            connection.lose()
