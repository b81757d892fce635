"""Queries to a supervisor from several threads: bounded waits, one thread per socket."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq

from protocol.lifecycle import StatusReply
from protocol.message import encode
from protocol.process.run_dir import lifecycle_address
from protocol.process.status import StatusLink
from protocol.transport.channel import HighWaterMark, RouterChannel

REPLY = StatusReply([], True, None)
PATIENCE_S = 10.0
"""Much less than the timeouts of the queries that are cut short."""


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[RouterChannel]:
    """A socket that listens, and answers only when the test asks for it."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = lifecycle_address(str(tmp_path))
    link = RouterChannel(context, address, HighWaterMark.LIFECYCLE_LINK)
    yield link
    link.close()
    context.term()


def answer(supervisor: RouterChannel, until: threading.Event, prefix: bytes = b"") -> None:
    """Answer every query; with a prefix, after a body that cannot be decoded."""
    while not until.is_set():
        supervisor.socket.poll(5)
        for received in supervisor.drain(10):
            if prefix:
                supervisor.send(received.peer, 0, prefix)
            supervisor.send(received.peer, 0, encode(REPLY))


@pytest.mark.usefixtures("supervisor")
def test_closing_ends_the_wait_of_another_thread(tmp_path: Path) -> None:
    with ThreadPoolExecutor(3) as pool:
        for _ in range(5):
            link = StatusLink(str(tmp_path))
            asking = [pool.submit(link.query, 6 * PATIENCE_S) for _ in range(2)]
            time.sleep(0.02)
            began = time.monotonic()
            closing = pool.submit(link.close)
            link.close()
            assert time.monotonic() - began < PATIENCE_S
            closing.result(PATIENCE_S)
            assert [waiting.result(PATIENCE_S) for waiting in asking] == [None, None]
            assert link.query(1.0) is None


def test_threads_that_ask_at_once_are_all_answered(
    supervisor: RouterChannel, tmp_path: Path
) -> None:
    is_over = threading.Event()
    link = StatusLink(str(tmp_path))
    with ThreadPoolExecutor(5) as pool:
        answering = pool.submit(answer, supervisor, is_over)
        asking = [pool.submit(link.query, 60.0) for _ in range(40)]
        assert [waiting.result(60.0) for waiting in asking] == [REPLY] * 40
        is_over.set()
        answering.result(30.0)
    link.close()


def test_an_unreadable_reply_is_ignored(supervisor: RouterChannel, tmp_path: Path) -> None:
    is_over = threading.Event()
    link = StatusLink(str(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        answering = pool.submit(answer, supervisor, is_over, b"\x93\x01\xc1")
        assert [link.query(60.0) for _ in range(3)] == [REPLY] * 3
        is_over.set()
        answering.result(30.0)
    assert link._channel.num_bad_frames > 0
    link.close()


@pytest.mark.usefixtures("supervisor")
def test_a_query_that_waits_for_another_ends_by_its_timeout(tmp_path: Path) -> None:
    link = StatusLink(str(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(link.query, 6 * PATIENCE_S)
        time.sleep(0.02)
        began = time.monotonic()
        assert link.query(0.1) is None
        assert time.monotonic() - began < PATIENCE_S
        link.close()
        assert first.result(PATIENCE_S) is None


@pytest.mark.usefixtures("supervisor")
def test_a_handler_that_closes_while_its_own_thread_asks_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = StatusLink(str(tmp_path))
    wait = link._wait

    def interrupted(flag: int, deadline: float, watch_fd: int | None) -> bool:
        link.close()
        return wait(flag, deadline, watch_fd)

    monkeypatch.setattr(link, "_wait", interrupted)
    assert link.query(5.0) is None
    assert link._channel.socket.closed
