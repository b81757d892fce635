"""Addresses of processes: from their Hello, and from other messages before it."""

from typing import cast

from protocol.lifecycle import Role, Stop
from protocol.transport.channel import RouterChannel
from scripts.supervisor.actions import Slot
from scripts.supervisor.peers import Peers

CORE, STANDBY_CORE = Slot(Role.CORE), Slot(Role.STANDBY_CORE)


class FakeLink:
    def __init__(self) -> None:
        self.sent: list[tuple[bytes, int]] = []
        self.forgotten: list[bytes] = []

    def send(self, peer: bytes, epoch: int, body: bytes) -> bool:
        self.sent.append((peer, epoch))
        return True

    def forget(self, peer: bytes) -> None:
        self.forgotten.append(peer)


def test_whose_hello_was_lost_is_reached_after_its_next_word() -> None:
    """A Hello takes precedence, because it names the process."""
    link = FakeLink()
    peers = Peers(cast(RouterChannel, link))
    peers.send(CORE, 5, Stop())
    assert link.sent == []
    peers.meet(CORE, b"one")
    peers.send(CORE, 5, Stop())
    peers.learn(CORE, b"two")
    peers.meet(CORE, b"one")
    peers.send(CORE, 5, Stop())
    assert link.sent == [(b"one", 5), (b"two", 5)]


def test_exchanged_slots_exchange_their_peers() -> None:
    link = FakeLink()
    peers = Peers(cast(RouterChannel, link))
    peers.learn(STANDBY_CORE, b"heir")
    peers.exchange(STANDBY_CORE, CORE)
    peers.send(STANDBY_CORE, 6, Stop())
    peers.send(CORE, 6, Stop())
    assert link.sent == [(b"heir", 6)]
    peers.forget(CORE)
    assert link.forgotten == [b"heir"]
