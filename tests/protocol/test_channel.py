"""Channels over real sockets: messages arrive whole, and every failure has a name."""

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import zmq

from protocol import message
from protocol.message import PROTOCOL_VERSION, pack_header
from protocol.process.run_dir import client_address, lifecycle_address, worker_address
from protocol.transport.channel import (
    MAX_FRAME_BYTES,
    BadFrame,
    DealerChannel,
    FrameTooLarge,
    HighWaterMark,
    LinkEvent,
    PeerGone,
    RouterChannel,
)
from protocol.transport.frame_sequence import Flag
from tests.protocol.link import Context, Link, eventually
from tests.protocol.relay import Relay
from tests.timing import within


@pytest.fixture
def link(tmp_path: Path) -> Iterator[Link]:
    made = Link(str(tmp_path))
    yield made
    made.close()


def test_messages_arrive_both_ways_with_epoch_and_number(link: Link) -> None:
    eventually(lambda: link.dealer.send(7, b"one"))
    assert link.dealer.send(8, b"")
    one, two = link.receive(link.router), link.receive(link.router)
    assert one.peer == two.peer
    assert one.peer[:1] == b"T"
    assert len(one.peer) == 16
    assert (one.header, one.body) == ((7, 0, Flag.BEGINS), b"one")
    assert (two.header, two.body) == ((8, 1, Flag(0)), b"")
    for body in (b"back", b"more"):
        assert link.router.send(one.peer, 9, body)
    assert link.receive(link.dealer) == (b"", (9, 0, Flag.BEGINS), b"back")
    assert link.receive(link.dealer) == (b"", (9, 1, Flag(0)), b"more")


def test_numbers_count_per_peer_and_never_go_back(link: Link) -> None:
    peer = link.greet()
    other = DealerChannel(link.context, link.address, link.hwm)
    eventually(lambda: other.send(0, b""))
    second = link.receive(link.router).peer
    for _ in range(3):
        assert link.router.send(peer, 0, b"")
    assert link.router.send(second, 0, b"")
    link.router.forget(peer)
    link.router.forget(peer)
    assert link.router.send(peer, 0, b"")
    assert link.receive(other).header.seq == 0
    assert [link.receive(link.dealer).header.seq for _ in range(4)] == [0, 1, 2, 3]
    other.close()


def test_nothing_is_kept_for_a_forgotten_peer(link: Link) -> None:
    peer = link.greet()
    link.router.send(peer, 0, b"")
    link.router.forget(peer)
    assert peer not in link.router._sequences


def test_little_is_kept_for_peers_that_leave_without_an_answer(tmp_path: Path) -> None:
    """The lifecycle link has no beats."""
    link = Link(str(tmp_path), HighWaterMark.LIFECYCLE_LINK)
    peer = link.greet()
    for number in range(300):
        stranger = DealerChannel(link.context, link.address, link.hwm)
        eventually(lambda end=stranger: end.send(0, b"not a word that you know"))
        assert link.receive(link.router).peer != peer, number
        stranger.close()
    assert len(link.router._sequences) < 150
    assert link.dealer.send(0, b"still known")
    received = link.receive(link.router)
    assert (received.peer, received.header.flags) == (peer, Flag(0))
    assert peer in link.router._sequences
    link.close()


def test_draining_is_bounded_and_ends_where_nothing_is(link: Link) -> None:
    assert list(link.dealer.drain(5)) == []
    link.greet()
    for number in range(5):
        assert link.dealer.send(0, b"%d" % number)
    eventually(lambda: link.router.socket.poll(0))
    sizes = []
    bodies: list[bytes] = []
    while len(bodies) < 5:
        some = [item.body for item in link.router.drain(2)]
        sizes.append(len(some))
        bodies += some
    assert bodies == [b"0", b"1", b"2", b"3", b"4"]
    assert max(sizes) == 2


def test_a_peer_that_was_never_there_or_has_left_is_gone(link: Link) -> None:
    with pytest.raises(PeerGone):
        link.router.send(b"unknown", 0, b"")
    leaving = DealerChannel(link.context, link.address, link.hwm)
    eventually(lambda: leaving.send(0, b""))
    peer = link.receive(link.router).peer
    leaving.close()

    def is_gone() -> bool:
        assert (
            list(link.router.drain(1)) == []
        )  # a socket sees the end of a peer only when it reads
        try:
            link.router.send(peer, 0, b"")
        except PeerGone:
            return True
        return False

    eventually(is_gone)
    assert peer not in link.router._sequences


def test_a_queue_that_is_full_refuses_and_takes_more_when_it_was_read(link: Link) -> None:
    peer = link.greet()
    body = bytes(2**20)
    num_sent = 0
    while link.router.send(peer, 0, body):
        num_sent += 1
        assert num_sent <= 2 * link.hwm + 1
    assert num_sent >= link.hwm
    assert [link.receive(link.dealer).header.seq for _ in range(num_sent)] == list(range(num_sent))
    eventually(lambda: link.router.send(peer, 0, b"more"))
    assert link.receive(link.dealer).header.seq == num_sent


def test_without_a_connection_nothing_is_queued(tmp_path: Path) -> None:
    context: Context = zmq.Context()
    dealer = DealerChannel(context, client_address(str(tmp_path)), HighWaterMark.CLIENT_LINK)
    assert not dealer.send(0, b"lost")
    dealer.close()
    context.term()


def test_a_frame_of_the_largest_size_arrives_and_a_larger_one_is_refused_before_it_is_sent(
    link: Link,
) -> None:
    """libzmq would send it, and the receiver would disconnect again and again."""
    peer = link.greet()
    largest = bytes(MAX_FRAME_BYTES)
    for send in (link.dealer.send, lambda epoch, body: link.router.send(peer, epoch, body)):
        with pytest.raises(FrameTooLarge, match=str(MAX_FRAME_BYTES + 1)):
            send(0, largest + b"!")
        assert send(0, largest)
    assert len(link.receive(link.router).body) == MAX_FRAME_BYTES
    assert len(link.receive(link.dealer).body) == MAX_FRAME_BYTES
    assert link.follow() == [LinkEvent.CONNECTED]


def other_header(name: str, value: int) -> bytes:
    """Return a header with another constant, as a foreign program would write it."""
    with pytest.MonkeyPatch.context() as foreign:
        foreign.setattr(message, name, value)
        return pack_header(1, 2, b"body")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (other_header("MAGIC", 0), "header starts with"),
        (other_header("PROTOCOL_VERSION", 99), f"protocol 99, this program {PROTOCOL_VERSION}"),
    ],
)
def test_unreadable_frames_are_skipped_and_counted_with_sender_and_reason(
    link: Link, header: bytes, reason: str
) -> None:
    peer = link.greet()
    link.dealer.socket.send_multipart([header, b"body"])
    link.router.socket.send_multipart([peer, header, b"body"])
    assert link.dealer.send(0, b"good")
    assert link.router.send(peer, 0, b"good")
    for end, sender in ((link.router, peer), (link.dealer, b"")):
        assert link.receive(end).body == b"good"
        assert end.num_bad_frames == 1
        assert end.last_bad_frame is not None
        assert end.last_bad_frame.peer == sender
        assert reason in end.last_bad_frame.reason


def test_a_peer_of_another_version_gets_a_frame_with_this_version(link: Link) -> None:
    """The peer can then report both versions; a foreign program gets nothing."""
    peer = link.greet()
    for name, number in (("MAGIC", 0), ("PROTOCOL_VERSION", 99)):
        before = link.dealer.num_read
        link.dealer.socket.send_multipart([other_header(name, number), b"body"])
        assert link.dealer.send(0, b"next")
        assert link.receive(link.router).body == b"next"
        assert link.router.send(peer, 0, b"last")
        assert link.receive(link.dealer).body == b"last"
        assert link.dealer.num_read - before == 1 + (name == "PROTOCOL_VERSION")
    link.dealer.socket.send_multipart([other_header("PROTOCOL_VERSION", 99), b"body"])
    eventually(lambda: not list(link.router.drain(1)) and link.router.num_bad_frames == 3)
    with pytest.MonkeyPatch.context() as other:
        other.setattr(message, "PROTOCOL_VERSION", 99)
        eventually(lambda: not list(link.dealer.drain(1)) and link.dealer.num_bad_frames == 1)
    assert link.dealer.last_bad_frame is not None
    reason = f"peer has protocol {PROTOCOL_VERSION}, this program 99"
    assert link.dealer.last_bad_frame.reason == reason


def test_bodies_that_cannot_be_decoded_are_counted_by_the_caller(link: Link) -> None:
    link.router.count_bad_frame(b"peer", "why")
    assert (link.router.num_bad_frames, link.router.last_bad_frame) == (1, BadFrame(b"peer", "why"))


def test_a_dealer_reconnects_to_a_successor_and_reports_it(link: Link) -> None:
    """Its identity stays; frames sent in between are refused, or lost with the connection."""
    peer = link.greet()
    eventually(lambda: link.follow() == [LinkEvent.CONNECTED])
    link.router.close()
    eventually(lambda: link.follow() == [LinkEvent.CONNECTED, LinkEvent.DISCONNECTED])
    eventually(lambda: not link.dealer.send(0, b"lost"))
    link.router = RouterChannel(link.context, link.address, link.hwm)
    eventually(lambda: len(link.follow()) == 3)
    assert link.events[-1] is LinkEvent.CONNECTED
    assert link.dealer.send(0, b"found")
    received = link.receive(link.router)
    assert (received.peer, received.body) == (peer, b"found")


def test_a_peer_whose_connection_breaks_is_received_over_the_next_one(tmp_path: Path) -> None:
    """This holds for a router that has not yet read the end of the old connection, too."""
    for place in ("front", "back"):
        (tmp_path / place).mkdir()
    address = client_address(str(tmp_path / "front"))
    link = Link(str(tmp_path / "back"))
    with Relay(address.removeprefix("ipc://"), link.address.removeprefix("ipc://")) as relay:
        link.dealer.close()
        link.dealer = DealerChannel(link.context, address, link.hwm)
        peer = link.greet()
        link.follow()
        for number in range(3):
            assert link.dealer.send(0, b"unread")
            before = len(link.events)
            relay.cut()
            eventually(lambda before=before: len(link.follow()) == before + 2)
            assert link.events[-2:] == [LinkEvent.DISCONNECTED, LinkEvent.CONNECTED]
            assert link.dealer.send(0, b"anew %d" % number)
            received = link.receive(link.router)
            while received.body == b"unread":
                received = link.receive(link.router)
            assert (received.peer, received.body) == (peer, b"anew %d" % number)
            assert link.router.send(peer, 0, b"welcome")
            assert link.receive(link.dealer).body == b"welcome"
        link.router.beat()
        assert set(link.router._sequences) == {peer}, "nothing is kept for broken connections"
    link.close()


def test_each_link_has_its_own_socket() -> None:
    addresses = {client_address("/d"), worker_address("/d"), lifecycle_address("/d")}
    assert addresses == {
        "ipc:///d/core.sock",
        "ipc:///d/workers.sock",
        "ipc:///d/supervisor.sock",
    }


def test_a_peer_that_comes_back_after_a_while_is_found_at_once() -> None:
    """Failed attempts must not delay it: a new core waits for its clients and workers."""

    def reconnect() -> dict[str, float]:
        with TemporaryDirectory(prefix="troika-") as run_dir:
            link = Link(run_dir)
            try:
                eventually(lambda: LinkEvent.CONNECTED in link.follow())
                link.router.close()
                eventually(lambda: LinkEvent.DISCONNECTED in link.follow())
                time.sleep(1.2)  # pauses between attempts would have grown by then
                link.router = RouterChannel(link.context, link.address, link.hwm)
                bound_at = time.monotonic()
                eventually(lambda: link.follow().count(LinkEvent.CONNECTED) == 2)
                return {"after_s": time.monotonic() - bound_at}
            finally:
                link.close()

    within(3, reconnect, after_s=0.06)
