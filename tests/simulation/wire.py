"""The simulated wire: its connections, and the faults of single frames.

A connection is an ordered stream in each direction, as over ipc. When it breaks, or an end dies,
the last part of what is in flight is lost, and each end notices by itself. Beyond that the wire may
damage single frames: drop, duplicate, reorder, delay, flip a bit, truncate.
"""

from collections import deque

import zmq

from tests.simulation.world import SECOND, Process, World

_RECONNECT_S, _RECONNECT_MAX_S = 0.02, 0.5
_HANDSHAKE_S = 2.0
_UNFLUSHED_S = 0.002
"""Messages sent this shortly before the sender's death may be lost."""
FRAME_FAULTS = ("drop", "duplicate", "reorder", "delay", "flip", "truncate")
Parts = list[bytes]


class Endpoint:
    """The wire's view of a socket."""

    def __init__(self, owner: Process, fd: int) -> None:
        self.owner = owner
        self.fd = fd
        self.identity = b""
        self.address = ""
        self.is_closed = False
        self.inbox: deque[tuple[Lane, Parts]] = deque()
        self.connection: Connection | None = None
        """A DEALER's only connection."""
        self.peers: dict[bytes, Connection] = {}
        """A ROUTER's connections by identity."""
        self.lanes: dict[bytes, Lane] = {}
        """The outgoing lanes, by peer for a ROUTER; a DEALER has one at most."""

    def link_event(self, event: int) -> None:
        """A connection of a DEALER was made or lost."""


class Wire:
    """All listeners and connections, and the rates of frame faults."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.listeners: dict[str, Endpoint] = {}
        self.connections: list[Connection] = []
        self._rates: dict[str, float] = {}
        self._rate = 0.0
        """Probability that anything happens to a frame."""
        self.is_harmful = False
        self.failpoint_rate = 0.0
        """Probability that a process is killed when it reaches a failpoint."""
        self.partitioned: set[str] = set()
        """Addresses that accept no connection at the moment."""

    def delay(self) -> int:
        """Draw the ordinary latency of a frame."""
        return 40 + int(self.world.random() * 200)

    def harm(self, rates: dict[str, float]) -> None:
        """Set the probability of each of `FRAME_FAULTS` for every frame from now on."""
        self._rates = dict(rates)
        self._rate = sum(rates.values())
        self.is_harmful = bool(rates)

    def is_harmed(self, lane: "Lane", parts: Parts) -> bool:
        """Draw whether a fault happens to a frame, and apply it."""
        world, rates = self.world, self._rates
        if world.random() >= self._rate:
            return False
        kind = world.rng.choices(list(rates), list(rates.values()))[0]
        world.counts[kind] += 1
        world.trace(f"{kind} {lane.connection.name}")
        getattr(lane, kind)(parts)
        return True

    def connect(self, dealer: Endpoint, delay_s: float = 0.0) -> None:
        """Try to connect, and retry with growing pauses."""
        self.world.after(self.delay() + int(delay_s * SECOND), self._try, dealer, delay_s)

    def _try(self, dealer: Endpoint, delay_s: float) -> None:
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
            dealer.lanes[b""] = connection.forth
            router.lanes[dealer.identity] = connection.back
            dealer.link_event(zmq.Event.HANDSHAKE_SUCCEEDED)

    def partition(self, address: str, seconds: float) -> None:
        """Break all connections to an address, and accept none for a while."""
        self.partitioned.add(address)
        for connection in list(self.connections):
            if connection.dealer.address == address:
                connection.lose()
        self.world.after(int(seconds * SECOND), self.partitioned.discard, address)


class Lane:
    """One direction of a connection."""

    __slots__ = (
        "_last_arrival",
        "_world",
        "connection",
        "lost_after",
        "name",
        "num_pending",
        "receiver",
    )

    def __init__(self, connection: "Connection", receiver: Endpoint, name: str) -> None:
        self.connection = connection
        self.receiver = receiver
        self.name = name
        self.num_pending = 0
        """Frames that the receiver has not read yet."""
        self.lost_after: int | None = None
        """Frames that leave later than this do not arrive."""
        self._last_arrival = 0
        self._world = connection.wire.world

    @property
    def known_until(self) -> int:
        """Arrival time of the last frame that is in flight in order."""
        return self._last_arrival

    def deliver_later(self, parts: Parts, extra: int = 0) -> None:
        """Deliver a frame after all that are in flight."""
        world = self._world
        current = world.current
        left = world.now if current is None else current.busy_until
        arrival = left + 40 + int(world.random() * 200) + extra
        if arrival <= self._last_arrival:
            arrival = self._last_arrival + 1
        self._last_arrival = arrival
        self.num_pending += 1
        world.at(arrival, self._deliver, parts, left)

    def _deliver(self, parts: Parts, left: int) -> None:
        receiver, lost_after = self.receiver, self.lost_after
        is_lost = lost_after is not None and left > lost_after
        if is_lost or receiver.is_closed:
            self.num_pending -= 1
            return
        self._world.trace_frame(self.name, parts)
        receiver.inbox.append((self, parts))
        receiver.owner.arrived(receiver.fd)

    # The frame faults: `FRAME_FAULTS` -------------------------------------------------------------

    def drop(self, parts: Parts) -> None:
        """Lose the frame."""

    def duplicate(self, parts: Parts) -> None:
        """Deliver the frame twice."""
        self.deliver_later(parts)
        self.deliver_later(list(parts), self._world.between(0, 0.01))

    def reorder(self, parts: Parts) -> None:
        """Let later frames overtake it."""
        wire = self.connection.wire
        left = wire.world.local_time
        self.num_pending += 1
        arrival = left + wire.delay() + wire.world.between(0.001, 0.05)
        wire.world.at(arrival, self._deliver, parts, left)

    def delay(self, parts: Parts) -> None:
        """Delay it, and all later frames."""
        self.deliver_later(parts, self._world.between(0.001, 0.2))

    def flip(self, parts: Parts) -> None:
        """Flip one bit."""
        place = self._world.rng.randrange(8 * sum(map(len, parts)))
        harmed = []
        for part in parts:
            if 0 <= place < 8 * len(part):
                number = int.from_bytes(part, "little") ^ 1 << place
                part = number.to_bytes(len(part), "little")  # noqa: PLW2901
            place -= 8 * len(part)
            harmed.append(part)
        self.deliver_later(harmed)

    def truncate(self, parts: Parts) -> None:
        """Cut one part, or drop the last part."""
        rng = self._world.rng
        harmed = list(parts)
        index = rng.randrange(len(parts))
        if rng.random() < 0.2 and len(harmed) > 1:
            harmed.pop()
        else:
            harmed[index] = harmed[index][: rng.randrange(max(1, len(harmed[index])))]
        self.deliver_later(harmed)


class Connection:
    """A connection between a DEALER and a ROUTER, until it is lost."""

    def __init__(self, wire: Wire, dealer: Endpoint, router: Endpoint) -> None:
        self.wire = wire
        self.dealer = dealer
        self.router = router
        self.is_up = True
        self.name = f"{dealer.owner.name}>{router.owner.name}"
        self.forth = Lane(self, router, self.name)
        self.back = Lane(self, dealer, f"{self.name} back")

    # Its end --------------------------------------------------------------------------------------

    def lose(self) -> None:
        """Break: the last part of what is in flight is lost, and each end notices by itself."""
        if not self.is_up:
            return
        self.is_up = False
        wire, world = self.wire, self.wire.world
        wire.connections.remove(self)
        for lane in (self.forth, self.back):
            lane.lost_after = world.now - world.between(0, _UNFLUSHED_S) * (world.random() < 0.5)
            known = max(world.now, lane.known_until)
            world.at(known + wire.delay(), self._notice, lane.receiver)

    def _notice(self, end: Endpoint) -> None:
        if end.is_closed or not end.owner.is_alive:
            return
        if end is self.router:
            if end.peers.get(self.dealer.identity) is self:
                del end.peers[self.dealer.identity]
                del end.lanes[self.dealer.identity]
        else:
            end.connection = None
            end.lanes.clear()
            end.link_event(zmq.Event.DISCONNECTED)
            self.wire.connect(end, _RECONNECT_S)
