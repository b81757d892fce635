"""The order of the frames of one connection: what was lost, harmed or repeated on the way shows.

No sockets here. Each end numbers what it sends. A receiver takes the next number and nothing else:
what comes again is dropped, and so is everything after a gap, until a frame begins anew. The
connecting end begins anew when a frame of either direction is missing; the binding end answers that
with a frame that begins anew likewise. So both ends agree on a moment from which all was received,
and what was under way before it is repaired from the client's ledger, or by adopting the workers.
"""

import enum

from protocol.message import Header


class Flag(enum.IntFlag):
    """What a frame says beside its body, or with an empty one."""

    NONE = 0
    BEGINS = 1
    """Whatever is missing before this frame is not waited for."""
    BEAT = 2
    """No message: it shows that the link is there, and what is missing before it. A connecting end
    answers it with another."""
    LOST = 4
    """No message: frames of whoever gets this are missing, and it must begin anew."""


_BEGINS = int(Flag.BEGINS)


class Verdict(enum.Enum):
    """What a frame's number says."""

    NEXT = "next"
    REPEATED = "repeated"
    AFTER_A_GAP = "after a gap"


class FrameSequence:
    """Both directions of one connection, at one end."""

    __slots__ = ("_expected", "_takes_gaps", "next_seq", "owes_beginning")

    def __init__(self, *, takes_gaps: bool, first_seq: int = 0) -> None:
        """With `takes_gaps` every frame stands for itself: only repeated ones are dropped."""
        self.next_seq = first_seq
        """Of what is sent."""
        self.owes_beginning = False
        """Whether the other end began anew, and was not answered yet."""
        self._takes_gaps = takes_gaps
        self._expected = 0

    def judge(self, header: Header) -> Verdict:
        """Compare a frame's number with the one that is due, and count it if it is taken."""
        begins = bool(header.flags & _BEGINS)
        if header.seq < self._expected:
            return Verdict.REPEATED
        if header.seq > self._expected and not begins and not self._takes_gaps:
            return Verdict.AFTER_A_GAP
        self._expected = header.seq + 1
        self.owes_beginning |= begins
        return Verdict.NEXT

    def reconnected(self) -> None:
        """Whoever is at the other end now may count from 0."""
        self._expected = 0
