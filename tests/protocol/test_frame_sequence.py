"""Sequence numbers of frames: next, repeated, missing, or of a sender out of step."""

from protocol.message import Header
from protocol.transport.frame_sequence import Flag, FrameOrder, FrameSequence

NEXT, REPEATED, GAP = FrameOrder.NEXT, FrameOrder.REPEATED, FrameOrder.AFTER_A_GAP


def judged(sequence: FrameSequence, *numbers: int, flags: int = 0) -> list[FrameOrder]:
    return [sequence.check(Header(1, number, flags)) for number in numbers]


def test_frames_are_taken_in_order_and_once() -> None:
    sequence = FrameSequence(ignores_gaps=False)
    assert judged(sequence, 0, 1, 1, 2, 4, 3) == [NEXT, NEXT, REPEATED, NEXT, GAP, NEXT]
    assert judged(sequence, 9, flags=Flag.BEGINS) == [NEXT]
    assert judged(sequence, 10, 5) == [NEXT, REPEATED]
    lossy = FrameSequence(ignores_gaps=True)
    assert judged(lossy, 0, 7, 3, 8) == [NEXT, NEXT, REPEATED, NEXT]


def test_frames_that_all_arrive_twice_are_not_a_gap() -> None:
    sequence = FrameSequence(ignores_gaps=False)
    numbers = [number for number in range(10) for _ in range(2)]
    assert judged(sequence, *numbers) == [NEXT, REPEATED] * 10


def test_a_peer_that_counts_on_from_a_lower_number_is_followed_after_a_beginning() -> None:
    """A frame of a lost connection came late, and its number was believed."""
    sequence = FrameSequence(ignores_gaps=False)
    judged(sequence, 0, 1)
    assert judged(sequence, 40, flags=Flag.BEGINS) == [NEXT]
    assert judged(sequence, 2, 3, 4) == [REPEATED, REPEATED, GAP]
    assert judged(sequence, 5) == [GAP]
    assert judged(sequence, 6, flags=Flag.BEGINS) == [NEXT]
    assert judged(sequence, 7) == [NEXT]
