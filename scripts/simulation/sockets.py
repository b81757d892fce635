"""Simulated ZeroMQ: contexts and sockets for the real channels."""

from collections import deque
from typing import Any

import zmq

from scripts.simulation.wire import Endpoint, Parts, Wire
from scripts.simulation.world import Process


class _Again(zmq.Again):
    """The same, without asking the system for its text each time."""

    errno = zmq.EAGAIN
    __init__ = Exception.__init__


def epoch_of(header: bytes) -> int:
    """What stands in a header, which may be harmed; -1 without one."""
    return int.from_bytes(header[4:8], "little") if header else -1


def receive(socket: "SimulatedSocket") -> Parts | None:
    """Stands for the reading of a message part by part."""
    return socket.receive()


def send(socket: "SimulatedSocket", parts: Parts) -> None:
    """Likewise for writing."""
    socket.send_multipart(parts)


class WouldWait(Exception):
    """A poll has found nothing: whoever waits goes on in its next turn."""


class SimulatedContext:
    """A `zmq.Context` of one process."""

    def __init__(self, wire: Wire, owner: Process) -> None:
        self._wire = wire
        self._owner = owner

    def socket(self, kind: int) -> "SimulatedSocket":
        """A ROUTER or a DEALER."""
        return SimulatedSocket(self._wire, self._owner, kind)

    def term(self) -> None:
        """Nothing is left to wait for."""

    def destroy(self, linger: int = 0) -> None:
        """Likewise."""


class _Monitor:
    """What tells a DEALER's owner of connections made and lost."""

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
        """Of the last message; beats are none."""
        self._wire = wire
        self._hwm = 0
        self._is_router = kind == zmq.ROUTER
        owner.on_death.append(self.close)

    @property
    def last_epoch_read(self) -> int:
        """Of the last message that was read."""
        return epoch_of(self._header_read)

    @property
    def last_epoch_sent(self) -> int:
        """Of the last message that was sent."""
        return epoch_of(self._header_sent)

    def setsockopt(self, option: int, value: Any) -> None:
        """Take what matters here."""
        if option == zmq.IDENTITY:
            self.identity = value
        elif option in (zmq.SNDHWM, zmq.RCVHWM):
            self._hwm += value

    def getsockopt(self, option: int) -> int:
        """The descriptor."""
        assert option == zmq.FD
        return self.fd

    def bind(self, address: str) -> None:
        """Listen."""
        self.address = address
        self._wire.listeners[address] = self

    def connect(self, address: str) -> None:
        """Begin to connect."""
        self.address = address
        self._wire.connect(self)

    def get_monitor_socket(self, events: int) -> _Monitor:
        """Tells of connections."""
        self.monitor = _Monitor(self._wire.world.new_fd())
        return self.monitor

    def disable_monitor(self) -> None:
        """It tells no more."""

    def poll(self, timeout: int = 0, flags: int = zmq.POLLIN) -> int:
        """What is possible now, of `flags`: of a DEALER.

        Raises:
            WouldWait: nothing can be read yet.
        """
        if flags == zmq.POLLIN and not self.inbox:
            raise WouldWait
        can_send = any(lane.num_pending < self._hwm for lane in self.lanes.values())
        return flags & ((zmq.POLLIN if self.inbox else 0) | (zmq.POLLOUT if can_send else 0))

    def send_multipart(self, parts: Parts, flags: int = 0) -> None:
        """Send to the peer named by the first part, or to the only one."""
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
        # What is sent before the end of a connection is noticed goes nowhere.
        if lane.connection.is_up and not (
            self._wire.is_harmful and self._wire.is_harmed(lane, parts)
        ):
            lane.deliver_later(parts)

    def receive(self) -> Parts | None:
        """The parts of the next message; None if there is none."""
        if not self.inbox:
            return None
        lane, parts = self.inbox.popleft()
        lane.num_pending -= 1
        if len(parts) > 1 and parts[1]:
            self._header_read = parts[0]
        return [lane.connection.dealer.identity, *parts] if self._is_router else parts

    def link_event(self, event: int) -> None:
        """Called by the wire."""
        if self.monitor is not None:
            self.monitor.events.append(int(event).to_bytes(2, "little") + bytes(4))
            self.owner.arrived(self.monitor.fd)

    def close(self, linger: int = 0) -> None:
        """Leave: the other ends will notice."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._wire.listeners.get(self.address) is self:
            del self._wire.listeners[self.address]
        mine = [*self.peers.values(), *([self.connection] if self.connection else [])]
        for connection in mine:
            connection.lose()
