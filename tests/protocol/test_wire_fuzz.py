"""Damaged and foreign frames between good ones; `tests/fuzz` has those that reach a decoder."""

import random
import typing
from binascii import crc32
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from protocol.message import encode, pack_header
from protocol.process.run_dir import client_address
from protocol.transport import multipart
from protocol.transport.channel import HighWaterMark, RouterChannel
from protocol.transport.frame_sequence import Flag
from tests.protocol.wire_corpus import DIRECTIONS, Direction


@pytest.mark.parametrize("direction", DIRECTIONS, ids=lambda direction: direction.name)
def test_corpus_has_every_message(direction: Direction) -> None:
    members = typing.get_args(direction.union) or (direction.union,)
    assert {type(message) for message in direction.messages} == set(members)
    for message in direction.messages:
        assert direction.decode(encode(message)) == message


class Inbox:
    """Replaces the frames that a router reads from its socket."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.frames: Iterator[list[bytes]] = iter(())
        monkeypatch.setattr(multipart, "receive", lambda socket: next(self.frames, None))


def stream(peer: bytes, count: int, first: int = 0) -> list[list[bytes]]:
    """Return good frames with consecutive numbers."""
    bodies = [b"%s %d" % (peer, number) for number in range(first, first + count)]
    flags = [Flag.BEGINS if number == 0 else Flag(0) for number in range(first, first + count)]
    return [
        [peer, pack_header(3, first + index, body, flags[index]), body]
        for index, body in enumerate(bodies)
    ]


def disturbances(
    good: list[list[bytes]], strangers: list[bytes], rng: random.Random
) -> Iterator[list[bytes]]:
    """Yield frames that a bad line or another peer may put between good frames.

    None may be delivered: they are damaged, repeated, or replayed under other identities.
    """
    while True:
        peer, header, body = rng.choice(good)
        kind = rng.randrange(6)
        if kind == 0:  # damaged: the checksum is wrong
            harm = bytearray(header + body)
            harm[rng.randrange(len(harm))] ^= 1 << rng.randrange(8)
            yield [peer, bytes(harm[: len(header)]), bytes(harm[len(header) :])]
        elif kind == 1:
            yield [peer, header[: rng.randrange(len(header))], body]
        elif kind == 2:
            yield [peer, *([b""] * rng.choice([0, 1, 3]))]
        elif kind == 3:  # replayed under the replayer's own identity, which has not begun
            yield [rng.choice(strangers), pack_header(2, rng.randint(1, 2**63), body), body]
        elif kind == 4:  # all is right but magic, version, or both
            foreign = rng.randbytes(4) + header[4:20]
            yield [rng.choice(strangers), foreign + checksum(foreign, body), body]
        else:
            yield [rng.choice(strangers), rng.randbytes(24), rng.randbytes(40)]


def checksum(fields: bytes, body: bytes) -> bytes:
    """Return the checksum that a forger would compute."""
    return crc32(body, crc32(fields)).to_bytes(4, "little")


@pytest.mark.parametrize("count", [20_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_good_frames_between_bad_ones_are_all_taken_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Each hundredth frame is good; replayed frames are late."""
    rng = random.Random(count)
    peers = [b"T" + rng.randbytes(15) for _ in range(2)]
    strangers = [b"T" + rng.randbytes(15) for _ in range(20)]
    streams = {peer: stream(peer, count // 200) for peer in peers}
    inbox = Inbox(monkeypatch)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = RouterChannel(context, client_address(str(tmp_path)), HighWaterMark.CLIENT_LINK)
    monkeypatch.setattr(router, "_send_empty", lambda peer, flag: None)
    bad = disturbances(streams[peers[0]], strangers, rng)

    def frames() -> Iterator[list[bytes]]:
        for index in range(count // 200):
            for peer in peers:
                yield list(streams[peer][index])
                for _ in range(90):
                    yield next(bad)
                yield list(streams[peer][rng.randint(0, index)])

    inbox.frames = frames()
    taken = list(router.drain(count))
    for peer in peers:
        assert [item.body for item in taken if item.peer == peer] == [
            body for _, _, body in streams[peer]
        ]
    assert len(taken) == 2 * (count // 200), "no frame of a stranger was delivered"
    assert router.num_read == router.num_dropped_frames + router.num_bad_frames + len(taken)
    assert router.num_bad_frames > 0
    assert set(router._sequences) <= {*peers, *strangers}
    router.close()
    context.term()
