"""Simulated ZeroMQ: contexts and sockets for the real channels, on a wire that fails as told.

A connection is an ordered stream in each direction, as over ipc. When it breaks, or an end dies, a
last part of what was under way is lost, and each end notices by itself. Beyond that a wire may harm
single frames: drop, duplicate, delay past others, flip a bit, cut off an end.
"""

from collections import deque
from typing import Any

import zmq

from scripts.simulation.world import SECOND, Process, World

_RECONNECT_S, _RECONNECT_MAX_S = 0.02, 0.5
_HANDSHAKE_S = 2.0
_UNFLUSHED_S = 0.002
"""What a process had sent so shortly before its death may not have left it."""
FRAME_FAULTS = ("drop", "duplicate", "reorder", "delay", "flip", "truncate")
Parts = list[bytes]


class _Again(zmq.Again):
    """The same, without asking the system for its text each time."""

    def __init__(self) -> None:
        self.errno = zmq.EAGAIN


class Wire:
    """Who listens where, and what happens to frames on their way."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: dict[str, SimulatedSocket] = {}
        self.connections: list[Connection] = []
        self.rates: dict[str, float] = {}
        """Probability of each of `FRAME_FAULTS`, for any frame on any link."""
        self.failpoint_rate = 0.0
        """Probability that whoever reaches a failpoint is killed there."""
        self.partitioned: set[str] = set()
        """Addresses that nobody can connect to now."""

    def delay(self) -> int:
        """How long a frame is under way when nothing is wrong."""
        return 40 + int(self.world.rng.random() * 200)

    def connect(self, dealer: "SimulatedSocket", delay_s: float = 0.0) -> None:
        """Try it after a while, and again with growing pauses."""
        self.world.after(self.delay() + int(delay_s * SECOND), self._try, dealer, delay_s)

    def _try(self, dealer: "SimulatedSocket", delay_s: float) -> None:
        if dealer.is_closed or not dealer.owner.is_alive or dealer.connection is not None:
            return
        router = self.listeners.get(dealer.address)
        if router is None or dealer.address in self.partitioned:
            self.connect(dealer, min(max(2 * delay_s, _RECONNECT_S), _RECONNECT_MAX_S))
        elif router.owner.is_stopped or dealer.owner.is_stopped:
            self.connect(dealer, _HANDSHAKE_S)
        else:
            connection = Connection(self, dealer, router)
            self.connections.append(connection)
            dealer.connection = router.peers[dealer.identity] = connection
            dealer.link_event(zmq.Event.HANDSHAKE_SUCCEEDED)

    def partition(self, address: str, seconds: float) -> None:
        """Break all connections to an address, and let no new one be made for a while."""
        self.partitioned.add(address)
        for connection in list(self.connections):
            if connection.dealer.address == address:
                connection.lose()
        self.world.after(int(seconds * SECOND), self.partitioned.discard, address)


class Connection:
    """One connection between a DEALER and a ROUTER, until it is lost."""

    def __init__(self, wire: Wire, dealer: "SimulatedSocket", router: "SimulatedSocket") -> None:
        self.wire = wire
        self.dealer = dealer
        self.router = router
        self.is_up = True
        self.num_pending = {dealer: 0, router: 0}
        """Frames under way to, or unread by, each end."""
        self._arrivals = {dealer: 0, router: 0}
        self._lost_after: dict[SimulatedSocket, int] = {}
        """By receiver: what left later than this does not arrive."""
        self._name = f"{dealer.owner.name}>{router.owner.name}"
        self._name_back = f"{router.owner.name}>{dealer.owner.name}"

    def send(self, receiver: "SimulatedSocket", parts: Parts) -> None:
        """Put a frame on the wire; what may happen to it is drawn."""
        world, rates = self.wire.world, self.wire.rates
        if rates and world.rng.random() < sum(rates.values()):
            kind = world.rng.choices(list(rates), list(rates.values()))[0]
            world.counts[kind] += 1
            world.trace(f"{kind} {self._name}")
            getattr(self, f"_{kind}")(receiver, parts)
        else:
            self._deliver_later(receiver, parts)

    def _deliver_later(self, receiver: "SimulatedSocket", parts: Parts, extra: int = 0) -> None:
        world = self.wire.world
        left = world.local_time
        arrival = max(left + self.wire.delay() + extra, self._arrivals[receiver] + 1)
        self._arrivals[receiver] = arrival
        self._put(receiver, parts, left, arrival)

    def _put(self, receiver: "SimulatedSocket", parts: Parts, left: int, arrival: int) -> None:
        self.num_pending[receiver] += 1
        self.wire.world.at(arrival, self._deliver, receiver, parts, left)

    def _deliver(self, receiver: "SimulatedSocket", parts: Parts, left: int) -> None:
        is_lost = left > self._lost_after.get(receiver, left)
        if is_lost or receiver.is_closed or not receiver.owner.is_alive:
            self.num_pending[receiver] -= 1
            return
        world = self.wire.world
        world.trace(
            self._name if receiver is self.router else f"{self._name} back", b"".join(parts)
        )
        receiver.arrive(self, parts)

    # What may happen to a frame -------------------------------------------------------------------

    def _drop(self, receiver: "SimulatedSocket", parts: Parts) -> None:
        """It never arrives."""

    def _duplicate(self, receiver: "SimulatedSocket", parts: Parts) -> None:
        self._deliver_later(receiver, parts)
        self._deliver_later(receiver, list(parts), self.wire.world.between(0, 0.01))

    def _reorder(self, receiver: "SimulatedSocket", parts: Parts) -> None:
        """Later frames overtake it."""
        world = self.wire.world
        left = world.local_time
        self._put(receiver, parts, left, left + self.wire.delay() + world.between(0.001, 0.05))

    def _delay(self, receiver: "SimulatedSocket", parts: Parts) -> None:
        """It, and all that comes after it."""
        self._deliver_later(receiver, parts, self.wire.world.between(0.001, 0.2))

    def _flip(self, receiver: "SimulatedSocket", parts: Parts) -> None:
        rng = self.wire.world.rng
        place = rng.randrange(8 * sum(map(len, parts)))
        harmed = []
        for part in parts:
            if 0 <= place < 8 * len(part):
                number = int.from_bytes(part, "little") ^ 1 << place
                part = number.to_bytes(len(part), "little")  # noqa: PLW2901
            place -= 8 * len(part)
            harmed.append(part)
        self._deliver_later(receiver, harmed)

    def _truncate(self, receiver: "SimulatedSocket", parts: Parts) -> None:
        """One of its parts is cut, or its last one is missing."""
        rng = self.wire.world.rng
        harmed = list(parts)
        index = rng.randrange(len(parts))
        if rng.random() < 0.2 and len(harmed) > 1:
            harmed.pop()
        else:
            harmed[index] = harmed[index][: rng.randrange(max(1, len(harmed[index])))]
        self._deliver_later(receiver, harmed)

    # Its end --------------------------------------------------------------------------------------

    def lose(self) -> None:
        """Break; a last part of what is under way is lost, and each end notices for itself."""
        if not self.is_up:
            return
        self.is_up = False
        wire, world = self.wire, self.wire.world
        wire.connections.remove(self)
        for end in (self.router, self.dealer):
            self._lost_after[end] = world.now - world.between(0, _UNFLUSHED_S) * (
                world.rng.random() < 0.5
            )
            known = max(world.now, self._arrivals[end])
            world.at(known + wire.delay(), self._notice, end)

    def _notice(self, end: "SimulatedSocket") -> None:
        if end.is_closed or not end.owner.is_alive:
            return
        if end is self.router:
            if end.peers.get(self.dealer.identity) is self:
                del end.peers[self.dealer.identity]
        else:
            end.connection = None
            end.link_event(zmq.Event.DISCONNECTED)
            self.wire.connect(end, _RECONNECT_S)


def epoch_of(header: bytes) -> int:
    """What stands in a header, which may be harmed."""
    return int.from_bytes(header[4:8], "little")


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


class SimulatedSocket:
    """As much of a `zmq.Socket` as the channels use."""

    def __init__(self, wire: Wire, owner: Process, kind: int) -> None:
        self.owner = owner
        self.kind = kind
        self.fd = wire.world.new_fd()
        self.inbox: deque[tuple[Connection, Parts]] = deque()
        self.identity = b""
        self.address = ""
        self.is_closed = False
        self.connection: Connection | None = None
        """Of a DEALER."""
        self.peers: dict[bytes, Connection] = {}
        """Of a ROUTER."""
        self.monitor: _Monitor | None = None
        self.last_epoch_read = -1
        """Of the last message; beats are none."""
        self.last_epoch_sent = -1
        self._wire = wire
        self._hwm = 0
        self._parts: Parts = []
        owner.on_death.append(self.close)

    @property
    def has_link_events(self) -> bool:
        """Whether its owner has yet to hear of a connection made or lost."""
        return self.monitor is not None and bool(self.monitor.events)

    def __hash__(self) -> int:
        return self.fd

    def setsockopt(self, option: int, value: Any) -> None:
        """Take what matters here."""
        if option == zmq.IDENTITY:
            self.identity = value
        elif option in (zmq.SNDHWM, zmq.RCVHWM):
            self._hwm += value

    def getsockopt(self, option: int) -> int:
        """RCVMORE, or the descriptor."""
        return len(self._parts) if option == zmq.RCVMORE else self.fd

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
        """What is possible now, of `flags`."""
        can_send = self.connection is not None and self._has_room(self.connection)
        return flags & ((zmq.POLLIN if self.inbox else 0) | (zmq.POLLOUT if can_send else 0))

    def _has_room(self, connection: Connection) -> bool:
        end = connection.router if self.kind == zmq.DEALER else connection.dealer
        return connection.num_pending[end] < self._hwm

    def send_multipart(self, parts: Parts, flags: int = 0) -> None:
        """Send to the peer named by the first part, or to the only one."""
        if self.kind == zmq.ROUTER:
            connection = self.peers.get(parts[0])
            if connection is None:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            parts, receiver = parts[1:], connection.dealer
        elif self.connection is None:
            raise _Again
        else:
            connection, receiver = self.connection, self.connection.router
        if not self._has_room(connection):
            raise _Again
        if parts[1]:
            self.last_epoch_sent = epoch_of(parts[0])
        self.owner.busy_until += 3
        if connection.is_up:  # else its end has not been noticed yet: it goes nowhere
            connection.send(receiver, parts)

    def arrive(self, connection: Connection, parts: Parts) -> None:
        """Called by the wire."""
        self.inbox.append((connection, parts))
        self.owner.arrived(self.fd)

    def recv(self, flags: int = 0) -> bytes:
        """The next part of a message."""
        if not self._parts:
            if not self.inbox:
                raise _Again
            connection, parts = self.inbox.popleft()
            connection.num_pending[self] -= 1
            if len(parts) > 1 and parts[1]:
                self.last_epoch_read = epoch_of(parts[0])
            names = [connection.dealer.identity] if self.kind == zmq.ROUTER else []
            self._parts = [*names, *parts]
        return self._parts.pop(0)

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
