"""Hostile peers on the core's sockets, with any frames: good traffic is not affected."""

import itertools
import os
import random
import socket
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from core_proc import loop
from protocol.api_core import Connect, decode_from_client
from protocol.core_worker import (
    ModelRunnerOutput,
    StepFailed,
    WorkerHello,
    decode_from_worker,
)
from protocol.message import ProtocolError, encode, pack_header
from protocol.transport import channel, multipart
from protocol.transport.channel import MAX_FRAME_BYTES
from protocol.transport.frame_sequence import Flag
from tests.core.loop_bench import CORE_EPOCH, FACTS, Bench, FakeClient, WorkerEnd, all_tokens
from tests.fuzz.mutation import harmed
from tests.protocol.wire_corpus import DIRECTIONS

MAX_GROWTH_BYTES = 32 * 2**20
NUM_CONNECTS = 1000
NUM_PARTS = 50_000
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """A connection that does not finish the handshake is closed soon."""
    monkeypatch.setattr(loop, "STATUS_INTERVAL_S", 0.1)
    monkeypatch.setattr(channel, "_HANDSHAKE_MS", 200)
    with Bench() as running:
        yield running


def state(bench: Bench) -> object:
    """Return all state that a message could change, except counters of dropped frames."""
    stats, group = bench.engine.stats(), bench.loop._workers._group
    return (
        bench.engine.state,
        bench.engine.pause_mode,
        stats.num_running_reqs,
        stats.num_waiting_reqs,
        stats.kv_cache_usage,
        stats.generation_tokens,
        stats.num_steps,
        stats.worker_restarts,
        group.peers,
        group.epochs,
        bench.loop._workers._adopted_epoch,
        sorted(bench.loop._clients._outboxes),
    )


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def num_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def raw(bench: Bench, path: str, *, greets: bool = True) -> socket.socket:
    """A connection with hand-written ZMTP."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(30.0)
    connection.connect(path.removeprefix("ipc://"))
    if greets:
        connection.sendall(_GREETING + bytes([4, len(_READY)]) + _READY)
    return connection


def is_closed(bench: Bench, connection: socket.socket) -> bool:
    """Return whether the core has closed a connection; bytes before the end are read."""
    connection.setblocking(False)
    bench.turn()
    try:
        return not connection.recv(4096)
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


def hostile_frames(
    index: int, captured: list[list[bytes]], epochs: list[int], rng: random.Random
) -> Iterator[list[bytes]]:
    """Yield frames for the client link (0) or the worker link (1), without valid introductions.

    They are damaged messages in valid frames of any of `epochs`, from unknown peers, and captured
    frames under the identity of their sender and of others. Captured frames come newest first:
    three of one sender in order would be those of a sender that counts anew.
    """
    direction = DIRECTIONS[(0, 3)[index]]
    bodies = [
        encode(message)
        for message in direction.messages
        if not isinstance(message, Connect | WorkerHello)
    ]
    decode = (decode_from_client, decode_from_worker)[index]
    names = [b"T" + rng.randbytes(15) for _ in range(8)]
    replayed = itertools.cycle(reversed(captured))
    for number, body in enumerate(harmed(bodies, rng)):
        if number % 10 == 0:
            sender, *parts = next(replayed)
            yield [sender, *parts]
            yield [rng.choice(names), *parts]
            continue
        try:
            if isinstance(decode(body), Connect | WorkerHello):
                continue
        except ProtocolError:
            pass
        header = pack_header(rng.choice(epochs), number, body, Flag.BEGINS)
        yield [rng.choice(names), header, body]


@pytest.mark.parametrize(
    "count", [8_000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(600)])]
)
def test_frames_of_strangers_change_no_state(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    worker, client = bench.worker(), bench.client()
    worker.answers = False
    sockets = [link.socket for link in bench.loop._links]
    captured: list[list[list[bytes]]] = [[], []]
    inboxes: list[deque[list[bytes]]] = [deque(), deque()]
    receive = multipart.receive

    def tapped(end: zmq.Socket[bytes]) -> list[bytes] | None:
        index = sockets.index(end) if end in sockets else None
        if index is not None and inboxes[index]:
            return inboxes[index].popleft()
        parts = receive(end)
        if index is not None and parts is not None:
            captured[index].append(list(parts))
        return parts

    monkeypatch.setattr(multipart, "receive", tapped)
    client.connect()
    client.add(1, max_tokens=6)
    worker.join()
    bench.until(lambda: len(worker.unanswered) >= 1)
    worker.send(*worker.compute())
    bench.until(lambda: client.tokens(1))
    for _ in range(3):
        bench.turn()
    before, rng = state(bench), random.Random(count)
    adopted = bench.loop._workers._adopted_epoch
    assert adopted is not None
    epochs = [CORE_EPOCH, CORE_EPOCH - 1, adopted, adopted - 1, 2**32 - 1]
    streams = [hostile_frames(index, captured[index][:], epochs, rng) for index in (0, 1)]
    for _ in range(count // 32):
        for inbox, frames in zip(inboxes, streams, strict=True):
            inbox.extend(itertools.islice(frames, 16))
        bench.loop.turn(0)
        while any(inboxes):
            bench.loop.turn(0)
    assert state(bench) == before
    assert not client.refused
    worker.answers = True
    client.finish(1)
    assert client.tokens(1) == all_tokens(6)
    assert not worker.is_killed
    bench.until(lambda: all(len(link._sequences) == 1 for link in bench.loop._links))


def test_who_captured_an_introduction_cannot_take_the_workers_place(bench: Bench) -> None:
    """A peer that claims an earlier incarnation cannot either; the worker itself may reconnect."""
    worker, client = bench.worker(5), bench.client()
    before, fenced = state(bench), bench.engine.stats().fenced_frames
    for number, epoch in enumerate((5, 4), start=1):
        stranger = WorkerEnd(bench, epoch)
        stranger.send(epoch, WorkerHello(0, worker.pid, FACTS))
        bench.until(lambda due=fenced + number: bench.engine.stats().fenced_frames == due)
    assert state(bench) == before
    client.add(1)
    client.finish(1)
    worker.join()
    client.add(2)
    client.finish(2)
    assert client.tokens(2) == all_tokens(4)


def test_no_other_peer_answers_for_the_worker(bench: Bench) -> None:
    """The stranger knows pid, facts and epoch."""
    worker, client = bench.worker(5), bench.client()
    worker.answers = False
    client.add(1)
    bench.until(lambda: worker.unanswered)
    before, fenced = state(bench), bench.engine.stats().fenced_frames
    epoch, step = worker.unanswered[0]
    stranger = WorkerEnd(bench, 5)
    stranger.send(epoch, ModelRunnerOutput(step.step_id, [99]))
    stranger.send(epoch, StepFailed(step.step_id, "forged"))
    bench.until(lambda: bench.engine.stats().fenced_frames == fenced + 2)
    assert state(bench) == before
    worker.answers = True
    client.finish(1)
    assert client.tokens(1) == all_tokens(4)


def test_countless_connections_leave_no_state(bench: Bench) -> None:
    """Some are silent, some send a few bytes and leave; requests go on meanwhile."""
    bench.worker()
    client = bench.client()
    bench.turn()
    fds, rss = num_fds(), resident_bytes()
    paths = (bench.child.core_client_address, bench.child.core_worker_address)
    for number in range(NUM_CONNECTS):
        raw(bench, paths[number % 2], greets=number % 4 == 0).close()
        if number % 100 == 0:
            talker = FakeClient(bench)
            talker.add(1)
            talker.close()
            client.add(number)
            client.finish(number)
    bench.until(lambda: num_fds() <= fds)
    bench.until(lambda: all(len(link._sequences) == 1 for link in bench.loop._links))
    assert resident_bytes() - rss <= MAX_GROWTH_BYTES


def test_a_handshake_that_is_not_finished_ends(bench: Bench) -> None:
    silent = raw(bench, bench.child.core_worker_address, greets=False)
    halfway = raw(bench, bench.child.core_client_address, greets=False)
    halfway.sendall(_GREETING)
    for connection in (silent, halfway):
        bench.until(lambda end=connection: is_closed(bench, end))
        connection.close()


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 2**30, 2**63 - 1])
def test_a_frame_that_is_too_large_is_refused_by_its_size(bench: Bench, size: int) -> None:
    """No memory is reserved for it."""
    bench.worker()
    client = bench.client()
    rss = resident_bytes()
    connection = raw(bench, bench.child.core_client_address)
    connection.sendall(b"\x02" + size.to_bytes(8, "big") + bytes(4096))
    bench.until(lambda: is_closed(bench, connection))
    connection.close()
    assert resident_bytes() - rss <= MAX_GROWTH_BYTES
    client.add(1)
    client.finish(1)


def test_a_message_of_very_many_parts_is_one_damaged_frame(bench: Bench) -> None:
    """Reading it takes a moment and has no effect."""
    bench.worker()
    client, stranger = bench.client(), FakeClient(bench)
    before, link = state(bench), bench.loop._links[0]
    num_dropped, rss = link.num_dropped_frames, resident_bytes()
    stranger.channel.socket.send_multipart([b"part"] * NUM_PARTS)
    began = time.thread_time()
    bench.until(lambda: link.num_dropped_frames > num_dropped)
    assert time.thread_time() - began < 2.0
    assert link.num_dropped_frames == num_dropped + 1
    assert state(bench) == before
    client.add(1)
    client.finish(1)
    assert resident_bytes() - rss <= MAX_GROWTH_BYTES
