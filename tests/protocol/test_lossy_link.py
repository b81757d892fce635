"""Links that lose, damage and repeat frames: it is noticed at once and repaired by a new start."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.message import Header, pack_header
from protocol.transport.channel import HighWaterMark
from protocol.transport.frame_sequence import Flag, FrameOrder, FrameSequence
from tests.protocol.link import Link, eventually


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    made = Link(str(tmp_path))
    yield made
    made.close()


def greet_both_ways(link: Link) -> bytes:
    peer = link.greet()
    assert link.router.send(peer, 1, b"welcome")
    assert link.receive(link.dealer).body == b"welcome"
    return peer


def notices_loss(link: Link) -> bool:
    assert list(link.router.drain(10)) == []
    assert list(link.dealer.drain(10)) == []
    return link.dealer.take_loss()


def begin_anew(link: Link, peer: bytes) -> None:
    assert link.dealer.send(1, b"anew", begins=True)
    assert link.receive(link.router).body == b"anew"
    assert link.router.send(peer, 1, b"answer")
    answer = link.receive(link.dealer)
    assert (answer.body, answer.header.flags) == (b"answer", Flag.BEGINS)
    assert not link.dealer.take_loss()


def test_a_frame_lost_on_its_way_to_the_binding_end_makes_the_other_reconnect(
    link: Link,
) -> None:
    peer = greet_both_ways(link)
    link.dealer._frames.next_seq += 1
    assert link.dealer.send(1, b"after the gap")
    eventually(lambda: notices_loss(link))
    assert link.dealer.send(1, b"still after it")
    eventually(lambda: notices_loss(link))
    begin_anew(link, peer)
    assert link.dealer.send(1, b"good")
    assert link.receive(link.router).body == b"good"


def test_a_frame_lost_on_its_way_to_the_connecting_end_makes_it_reconnect(link: Link) -> None:
    peer = greet_both_ways(link)
    link.router._sequences[peer].next_seq += 1
    assert link.router.send(peer, 1, b"after the gap")
    eventually(lambda: notices_loss(link))
    begin_anew(link, peer)


@pytest.mark.parametrize("is_upwards", [True, False])
def test_a_lost_frame_after_which_nothing_comes_shows_with_the_next_beat(
    link: Link, is_upwards: bool
) -> None:
    peer = greet_both_ways(link)
    sequence = link.dealer._frames if is_upwards else link.router._sequences[peer]
    assert not notices_loss(link)
    sequence.next_seq += 1
    link.router.beat()
    eventually(lambda: notices_loss(link))
    begin_anew(link, peer)
    link.router.beat()
    eventually(lambda: link.router.num_read and link.router._sequences[peer])
    assert not notices_loss(link)


def test_frames_that_come_again_are_dropped(link: Link) -> None:
    peer = greet_both_ways(link)
    again = [pack_header(1, 0, b"again", Flag.BEGINS), b"again"]
    link.dealer.socket.send_multipart(again)
    link.router.socket.send_multipart([peer, *again])
    assert link.dealer.send(1, b"new")
    assert link.router.send(peer, 1, b"new")
    for end in (link.router, link.dealer):
        assert link.receive(end).body == b"new"
        assert end.num_dropped_frames == 1
    assert not notices_loss(link)


@pytest.mark.parametrize(
    "parts",
    [
        [b""],
        [pack_header(1, 1, b"body")],
        [pack_header(1, 1, b"body"), b"body", b"more"],
        [b"short", b"body"],
        [pack_header(1, 1, b"body"), b"bode"],
        [pack_header(1, 1, b"body"), b"bod"],
    ],
)
def test_damaged_frames_are_dropped_and_repaired_without_an_error(
    link: Link, parts: list[bytes]
) -> None:
    peer = greet_both_ways(link)
    link.dealer.socket.send_multipart(parts)
    eventually(lambda: notices_loss(link))
    begin_anew(link, peer)
    link.router.socket.send_multipart([peer, *parts])
    eventually(lambda: notices_loss(link))
    begin_anew(link, peer)
    assert link.router.num_bad_frames == link.dealer.num_bad_frames == 0
    assert link.router.num_dropped_frames == link.dealer.num_dropped_frames == 1


def test_losses_before_a_beginning_do_not_cause_another_one(link: Link) -> None:
    """Each frame after the gap is answered by a mark; all but the first arrive late."""
    peer = greet_both_ways(link)
    link.dealer._frames.next_seq += 1
    for _ in range(5):
        assert link.dealer.send(1, b"after the gap")
    begin_anew(link, peer)
    assert link.dealer.num_dropped_frames == 0


def test_messages_of_the_lifecycle_stand_for_themselves(tmp_path: Path) -> None:
    link = Link(str(tmp_path), HighWaterMark.LIFECYCLE_LINK)
    greet_both_ways(link)
    link.dealer._frames.next_seq += 1
    assert link.dealer.send(1, b"after the gap")
    assert link.receive(link.router).body == b"after the gap"
    assert not notices_loss(link)
    link.close()


def test_a_forgotten_peer_that_continues_must_reconnect(link: Link) -> None:
    peer = greet_both_ways(link)
    link.router.forget(peer)
    assert link.dealer.send(1, b"unread")
    eventually(lambda: notices_loss(link))
    begin_anew(link, peer)


@given(
    st.lists(st.sampled_from(["ok", "lost", "again", "late"]), max_size=30),
    st.integers(0, 29),
)
def test_what_is_taken_is_a_run_without_gaps_from_the_last_beginning_on(
    fates: list[str], begins_at: int
) -> None:
    """Each frame is lost, damaged, repeated or delivered."""
    frames = [Header(1, i, Flag.BEGINS if i == begins_at else 0) for i in range(len(fates))]
    arriving: list[Header] = []
    late: list[Header] = []
    for frame, fate in zip(frames, fates, strict=True):
        arriving += [] if fate in ("lost", "late") else [frame] * (1 + (fate == "again"))
        late += [frame] if fate == "late" else []
        if len(late) > 1:
            arriving.append(late.pop(0))
    sequence = FrameSequence(ignores_gaps=False)
    taken = [f.seq for f in arriving + late if sequence.check(f) is FrameOrder.NEXT]
    before = [seq for seq in taken if seq < begins_at]
    after = [seq for seq in taken if seq >= begins_at]
    assert taken == before + after
    assert before == list(range(len(before)))
    assert after == list(range(begins_at, begins_at + len(after)))
