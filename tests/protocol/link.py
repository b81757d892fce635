"""Both ends of a link over real sockets."""

import time
from collections.abc import Callable

import zmq

from protocol.process.run_dir import client_address
from protocol.transport.channel import (
    DealerChannel,
    HighWaterMark,
    LinkEvent,
    Received,
    RouterChannel,
)

TIMEOUT_S = 30.0
Context = zmq.Context[zmq.Socket[bytes]]


def eventually(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition has not come true"
        time.sleep(0.0002)  # the other end's threads need CPU time too


class Link:
    """Both ends of one link."""

    def __init__(self, run_dir: str, hwm: HighWaterMark = HighWaterMark.WORKER_LINK) -> None:
        self.address = client_address(run_dir)
        self.hwm = hwm
        self.context: Context = zmq.Context()
        self.router = RouterChannel(self.context, self.address, hwm)
        self.dealer = DealerChannel(self.context, self.address, hwm)
        self.events: list[LinkEvent] = []

    def close(self) -> None:
        self.dealer.close()
        self.router.close()
        self.context.term()

    def follow(self) -> list[LinkEvent]:
        self.events += self.dealer.link_events()
        return self.events

    def receive(self, end: RouterChannel | DealerChannel) -> Received:
        received: list[Received] = []

        def has_come() -> bool:
            received.extend(end.drain(1))
            return bool(received)

        eventually(has_come)
        return received[0]

    def greet(self) -> bytes:
        """Send a first frame; return the dealer's identity as the router receives it."""
        eventually(lambda: self.dealer.send(7, b"hello"))
        return self.receive(self.router).peer
