"""Where processes can be reached: what their Hello says, and what is learned without it."""

from typing import cast

from protocol.channel import RouterChannel
from protocol.lifecycle import Role, Stop
from scripts.supervisor.actions import Slot
from scripts.supervisor.peers import Peers

CORE, STANDBY_CORE = Slot(Role.CORE), Slot(Role.STANDBY_CORE)


class PlayedLink:
    def __init__(self) -> None:
        self.told: list[tuple[bytes, int]] = []
        self.forgotten: list[bytes] = []

    def send(self, peer: bytes, epoch: int, body: bytes) -> bool:
        self.told.append((peer, epoch))
        return True

    def forget(self, peer: bytes) -> None:
        self.forgotten.append(peer)


def test_whose_hello_was_lost_is_reached_after_its_next_word() -> None:
    """What a Hello has said counts more than that: it names the process."""
    link = PlayedLink()
    peers = Peers(cast(RouterChannel, link))
    peers.send(CORE, 5, Stop())
    assert link.told == []
    peers.meet(CORE, b"one")
    peers.send(CORE, 5, Stop())
    peers.learn(CORE, b"two")
    peers.meet(CORE, b"one")
    peers.send(CORE, 5, Stop())
    assert link.told == [(b"one", 5), (b"two", 5)]


def test_places_are_exchanged_with_those_who_take_them() -> None:
    link = PlayedLink()
    peers = Peers(cast(RouterChannel, link))
    peers.learn(STANDBY_CORE, b"heir")
    peers.exchange(STANDBY_CORE, CORE)
    peers.send(STANDBY_CORE, 6, Stop())
    peers.send(CORE, 6, Stop())
    assert link.told == [(b"heir", 6)]
    peers.forget(CORE)
    assert link.forgotten == [b"heir"]
