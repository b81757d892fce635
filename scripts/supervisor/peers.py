"""Where the processes of each slot can be reached on the lifecycle link."""

from protocol.channel import PeerGone, RouterChannel
from protocol.message import Message, encode
from scripts.supervisor.supervised import Slot

SUPERVISOR_EPOCH = 0


class Peers:
    """Connections by slot. What somebody misses is said again, or its time ends."""

    def __init__(self, link: RouterChannel) -> None:
        self._link = link
        self._peers: dict[Slot, bytes] = {}

    def learn(self, slot: Slot, peer: bytes) -> None:
        """The process of a slot has said Hello."""
        self._peers[slot] = peer

    def meet(self, slot: Slot, peer: bytes) -> None:
        """The process of a slot has said something else; its Hello may have been lost."""
        self._peers.setdefault(slot, peer)

    def forget(self, slot: Slot) -> None:
        """The process of a slot is dead."""
        peer = self._peers.pop(slot, None)
        if peer is not None:
            self._link.forget(peer)

    def exchange(self, one: Slot, other: Slot) -> None:
        """The processes of two slots change places; there may be no such processes."""
        moved = {other: self._peers.pop(one, None), one: self._peers.pop(other, None)}
        self._peers.update({slot: peer for slot, peer in moved.items() if peer is not None})

    def tell(self, slot: Slot, epoch: int, message: Message) -> None:
        """Send to the process of a slot, which believes in this epoch."""
        peer = self._peers.get(slot)
        if peer is not None:
            self._send(peer, epoch, message)

    def answer(self, peer: bytes, message: Message) -> None:
        """Send to whoever has asked; nothing is kept of strangers."""
        self._send(peer, SUPERVISOR_EPOCH, message)
        self.pass_over(peer)

    def pass_over(self, peer: bytes) -> None:
        """Keep nothing of somebody who belongs to no slot: a stranger, or the dead."""
        if peer not in self._peers.values():
            self._link.forget(peer)

    def _send(self, peer: bytes, epoch: int, message: Message) -> None:
        try:
            self._link.send(peer, epoch, encode(message))
        except PeerGone:
            return
