"""The connections of processes on the lifecycle link, by slot."""

from protocol.message import Message, encode
from protocol.transport.channel import PeerGone, RouterChannel
from scripts.supervisor.actions import Slot

SUPERVISOR_EPOCH = 0


class Peers:
    """Sends to slots. Lost messages are repeated by the policy, or a deadline passes."""

    def __init__(self, link: RouterChannel) -> None:
        self._link = link
        self._peers: dict[Slot, bytes] = {}

    def learn(self, slot: Slot, peer: bytes) -> None:
        """Enter the connection from which a process has sent Hello."""
        self._peers[slot] = peer

    def meet(self, slot: Slot, peer: bytes) -> None:
        """Enter the connection of another message, unless there is one: Hello may be lost."""
        self._peers.setdefault(slot, peer)

    def forget(self, slot: Slot) -> None:
        """Remove the connection of a dead process."""
        peer = self._peers.pop(slot, None)
        if peer is not None:
            self._link.forget(peer)

    def exchange(self, one: Slot, other: Slot) -> None:
        """Exchange the connections of two slots; either may have none."""
        moved = {other: self._peers.pop(one, None), one: self._peers.pop(other, None)}
        self._peers.update({slot: peer for slot, peer in moved.items() if peer is not None})

    def send(self, slot: Slot, epoch: int, message: Message) -> None:
        """Send to the process of a slot, under the epoch that it knows."""
        peer = self._peers.get(slot)
        if peer is not None:
            self._send(peer, epoch, message)

    def answer(self, peer: bytes, message: Message) -> None:
        """Answer a query, and drop the connection's state unless it belongs to a slot."""
        self._send(peer, SUPERVISOR_EPOCH, message)
        self.drop_unknown(peer)

    def drop_unknown(self, peer: bytes) -> None:
        """Drop the state of a connection that belongs to no slot."""
        if peer not in self._peers.values():
            self._link.forget(peer)

    def _send(self, peer: bytes, epoch: int, message: Message) -> None:
        try:
            self._link.send(peer, epoch, encode(message))
        except PeerGone:
            return
