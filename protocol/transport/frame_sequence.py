"""The numbers of the frames of one connection: reveals lost, damaged and repeated frames.

No sockets here; channel.py describes the protocol. Each end numbers the frames that it sends. A
receiver takes the next number and no other: repeated frames are dropped, and so is every frame
after a gap until one has BEGINS. Requests that were under way before that frame are repaired from
the client's ledger, or by adopting the workers again.
"""

import enum

from protocol.message import Header


class Flag(enum.IntFlag):
    """Flags of a frame."""

    BEGINS = 1
    """The receiver takes this frame even if others before it are missing."""
    BEAT = 2
    """No message; reveals missing frames before it. A connecting end answers with another BEAT."""
    LOST = 4
    """No message; frames of its receiver were lost, so it must send BEGINS."""


_BEGINS = int(Flag.BEGINS)
_OUT_OF_STEP = 3
"""Consecutive former numbers that make a gap instead of repeated frames."""


class FrameOrder(enum.Enum):
    """How the number of a frame follows those before it."""

    NEXT = "next"
    REPEATED = "repeated"
    AFTER_A_GAP = "after a gap"


class FrameSequence:
    """Both directions of one connection, at one end."""

    def __init__(self, *, ignores_gaps: bool, first_seq: int = 0) -> None:
        """With `ignores_gaps` only repeated frames are dropped."""
        self.next_seq = first_seq
        """Number of the next frame that is sent."""
        self.owes_beginning = False
        """Whether the next frame must have BEGINS, as the answer to one."""
        self._ignores_gaps = ignores_gaps
        self._expected = 0
        self._former = 0
        """The last number that was lower than expected."""
        self._num_former = 0
        """Such numbers in a row, each one more than the last."""

    def check(self, header: Header) -> FrameOrder:
        """Compare a frame's number with the expected one; advance if the frame is taken."""
        seq, begins = header.seq, header.flags & _BEGINS
        if seq != self._expected:
            if seq < self._expected:
                return self._check_former(seq)
            if not begins and not self._ignores_gaps:
                return FrameOrder.AFTER_A_GAP
        self._expected = seq + 1
        self._num_former = 0
        if begins:
            self.owes_beginning = True
        return FrameOrder.NEXT

    def _check_former(self, seq: int) -> FrameOrder:
        """Distinguish repeated frames from a sender that counts on from a lower number.

        In the latter case this end has counted frames that did not belong to the connection.
        """
        self._num_former = self._num_former + 1 if seq == self._former + 1 else 1
        self._former = seq
        if self._ignores_gaps or self._num_former < _OUT_OF_STEP:
            return FrameOrder.REPEATED
        self._num_former = self._expected = 0
        return FrameOrder.AFTER_A_GAP

    def reconnected(self) -> None:
        """Begin a new connection: the other end may be another process, which counts from 0."""
        self._expected = 0
