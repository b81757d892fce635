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

    BEGINS = 1
    """Whatever is missing before this frame is not waited for."""
    BEAT = 2
    """No message: it shows that the link is there, and what is missing before it. A connecting end
    answers it with another."""
    LOST = 4
    """No message: frames of whoever gets this are missing, and it must begin anew."""


_BEGINS = int(Flag.BEGINS)
_OUT_OF_STEP = 3
"""So many former numbers in a row are none."""


class Verdict(enum.Enum):
    """What a frame's number says."""

    NEXT = "next"
    REPEATED = "repeated"
    AFTER_A_GAP = "after a gap"


class FrameSequence:
    """Both directions of one connection, at one end."""

    __slots__ = ("_expected", "_former", "_num_former", "_takes_gaps", "next_seq", "owes_beginning")

    def __init__(self, *, takes_gaps: bool, first_seq: int = 0) -> None:
        """With `takes_gaps` every frame stands for itself: only repeated ones are dropped."""
        self.next_seq = first_seq
        """Of what is sent."""
        self.owes_beginning = False
        """Whether the other end began anew, and was not answered yet."""
        self._takes_gaps = takes_gaps
        self._expected = 0
        self._former = 0
        """The last number that was taken for a former one."""
        self._num_former = 0
        """How many of these came one after the other."""

    def judge(self, header: Header) -> Verdict:
        """Compare a frame's number with the one that is due, and count it if it is taken."""
        seq, begins = header.seq, header.flags & _BEGINS
        if seq != self._expected:
            if seq < self._expected:
                return self._judge_former(seq)
            if not begins and not self._takes_gaps:
                return Verdict.AFTER_A_GAP
        self._expected = seq + 1
        self._num_former = 0
        if begins:
            self.owes_beginning = True
        return Verdict.NEXT

    def _judge_former(self, seq: int) -> Verdict:
        """A frame that comes again comes alone: whoever counts on from there is not out of date.

        Then it was this end that had counted what never belonged to the connection.
        """
        self._num_former = self._num_former + 1 if seq == self._former + 1 else 1
        self._former = seq
        if self._takes_gaps or self._num_former < _OUT_OF_STEP:
            return Verdict.REPEATED
        self._num_former = self._expected = 0
        return Verdict.AFTER_A_GAP

    def reconnected(self) -> None:
        """Whoever is at the other end now may count from 0."""
        self._expected = 0
