"""A child's lifecycle link in an event loop: every command of the supervisor is read."""

import argparse
import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import zmq

from protocol.config.settings import configure
from protocol.lifecycle import (
    MAX_REMARKS,
    Drain,
    Hello,
    Ready,
    Remarks,
    Role,
    Stop,
    decode_to_supervisor,
)
from protocol.message import Message, encode
from protocol.process import child_runtime, supervisor_link
from protocol.process.child_runtime import ChildProcess
from protocol.process.progress_page import ProgressPage
from protocol.process.run_dir import lifecycle_address
from protocol.transport.channel import HighWaterMark, Received, RouterChannel

TIMEOUT_S = 10.0
EPOCH = 4


class Bench:
    """A child in this process, and the socket of its supervisor."""

    def __init__(self, run_dir: str) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.link = RouterChannel(
            self.context, lifecycle_address(run_dir), HighWaterMark.LIFECYCLE_LINK
        )
        arguments = argparse.Namespace(parent_fd=0, epoch=EPOCH, rank=0, listen_fd=None)
        self.child = ChildProcess(Role.API, arguments, configure(model="null", run_dir=run_dir))
        hello = self.receive()
        assert isinstance(hello, Hello)

    def receive(self) -> Message:
        assert self.link.socket.poll(int(TIMEOUT_S * 1000))
        [received] = self.link.drain(1)
        self.peer = received.peer
        return decode_to_supervisor(received.body)

    def send(self, message: Message, epoch: int = EPOCH) -> None:
        assert self.link.send(self.peer, epoch, encode(message))

    def close(self) -> None:
        assert self.child._lifecycle is not None
        self.child._lifecycle.close()
        self.child.context.term()
        self.link.close()
        self.context.term()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(child_runtime, "watch_parent", lambda parent_fd: None)
    running = Bench(str(tmp_path))
    yield running
    running.close()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    """A loop without notifications of readable descriptors, as if each edge had been lost.

    The child's own periodic check runs only once.
    """
    made = asyncio.new_event_loop()
    monkeypatch.setattr(child_runtime, "REPEAT_S", 3600.0)
    monkeypatch.setattr(made, "add_reader", lambda fd, callback: None)
    yield made
    made.close()


async def until_received(received: Sequence[object], count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while len(received) < count:
        assert time.monotonic() < deadline, f"{len(received)} of {count} commands were delivered"
        await asyncio.sleep(0)


def wait_for_commands(child: ChildProcess) -> None:
    assert child.lifecycle_socket is not None
    assert child.lifecycle_socket.poll(int(TIMEOUT_S * 1000))


def test_a_process_is_watched_once_it_reports_ready(tmp_path: Path) -> None:
    """If it is stopped before its loop's first turn, its mark must not be that of the old epoch."""
    page, fd = ProgressPage.create("test")
    arguments = argparse.Namespace(
        parent_fd=None, epoch=EPOCH, rank=0, listen_fd=None, progress_fd=os.dup(fd)
    )
    config = configure(model="null", run_dir=str(tmp_path))
    child = ChildProcess(Role.CORE, arguments, config)
    child.reporter.idle()
    child.epoch = child.reporter.epoch = EPOCH + 1  # promoted
    child.ready()
    mark = page.read()
    assert mark is not None
    assert mark.epoch == EPOCH + 1
    assert mark.limit_s == config.recovery.hang_timeout_s
    child.reporter.close()
    child.context.term()
    page.close()
    os.close(fd)


def test_every_report_checks_for_commands_too(
    bench: Bench, loop: asyncio.AbstractEventLoop
) -> None:
    received: list[Drain | Stop] = []

    async def main() -> None:
        bench.child.attach_asyncio(loop, received.append)
        await asyncio.sleep(0)  # the check at the start finds nothing
        bench.send(Drain())
        wait_for_commands(bench.child)
        bench.child.ready()
        await until_received(received, 1)

    loop.run_until_complete(main())
    assert isinstance(received[0], Drain)
    assert isinstance(bench.receive(), Ready)


def test_a_child_checks_periodically_and_repeats_its_state(
    bench: Bench, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It checks periodically, whatever the loop reports, and after an exception too."""
    monkeypatch.setattr(child_runtime, "REPEAT_S", 0.01)
    monkeypatch.setattr(supervisor_link, "REPEAT_S", 0.01)
    loop.set_exception_handler(lambda loop, context: None)
    received: list[object] = []

    def receive(message: object) -> None:
        received.append(message)
        if len(received) == 1:
            raise ValueError("it was not expected")

    async def main() -> None:
        bench.child.attach_asyncio(loop, receive)
        bench.child.ready()
        for count in (1, 2):
            bench.send(Drain())
            await until_received(received, count)

    loop.run_until_complete(main())
    assert [type(bench.receive()) for _ in range(2)] == [Ready, Ready]


def test_remarks_that_are_too_many_are_counted(bench: Bench) -> None:
    lines = [f"replica {number} gets no requests" for number in range(MAX_REMARKS + 4)]
    for count in (MAX_REMARKS, MAX_REMARKS + 1, MAX_REMARKS + 4):
        bench.child.remark(lines[:count])
        remarks = bench.receive()
        assert isinstance(remarks, Remarks)
        *shown, last = remarks.lines
        assert shown == lines[: MAX_REMARKS - 1]
        num_more = count - MAX_REMARKS + 1
        rest = f"{num_more} further lines are not shown"
        assert last == (lines[count - 1] if num_more == 1 else rest)


def test_more_commands_than_one_look_takes_are_all_delivered(
    bench: Bench, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[Drain | Stop] = []
    arrived: list[Drain | Stop] = [Drain(), Stop(), Drain()]
    monkeypatch.setattr(bench.child, "messages", lambda: [arrived.pop()] if arrived else [])

    async def main() -> None:
        bench.child.attach_asyncio(loop, received.append)
        await until_received(received, 3)

    loop.run_until_complete(main())


def test_commands_after_many_for_another_process_are_delivered(
    bench: Bench, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More commands than one check reads are there when the first is seen."""
    link = bench.child._lifecycle
    assert link is not None
    for _ in range(40):
        bench.send(Stop(), EPOCH - 1)
    bench.send(Drain())
    arrived: list[Received] = []
    while len(arrived) < 41:
        wait_for_commands(bench.child)
        arrived += link.drain(41)

    def drain(limit: int) -> Iterator[Received]:
        for _ in range(min(limit, len(arrived))):
            link.num_read += 1
            yield arrived.pop(0)

    monkeypatch.setattr(link, "drain", drain)
    received: list[Drain | Stop] = []
    bench.child.attach_asyncio(loop, received.append)
    loop.run_until_complete(until_received(received, 1))
    assert received == [Drain()]
    assert bench.child.num_fenced_frames == 40


def test_a_child_can_speak_after_its_loop_has_ended(
    bench: Bench, loop: asyncio.AbstractEventLoop
) -> None:
    bench.child.attach_asyncio(loop, lambda message: None)
    loop.close()
    bench.child.ready()
    assert isinstance(bench.receive(), Ready)


def test_commands_to_another_incarnation_are_dropped_and_counted(bench: Bench) -> None:
    """A command for a predecessor is ignored."""
    received: list[object] = []
    bench.send(Stop(), EPOCH - 1)
    bench.send(Stop(), EPOCH + 1)
    bench.send(Drain())
    deadline = time.monotonic() + TIMEOUT_S
    while not received:
        assert time.monotonic() < deadline
        wait_for_commands(bench.child)
        received += bench.child.messages()
    assert received == [Drain()]
    assert bench.child.num_fenced_frames == 2


LEAVER = """
import sys, types, zmq
from protocol.process import child_runtime
from protocol.transport.channel import DealerChannel, HighWaterMark
from protocol.process.child_runtime import ChildProcess

child_runtime.FLUSH_MS = 20_000  # on a busy machine the reader may be slow

context = zmq.Context()
link = DealerChannel(context, sys.argv[1], HighWaterMark.WORKER_LINK)
assert link.socket.poll(20_000, zmq.POLLOUT)
for _ in range(8):
    assert link.send(1, bytes(60_000))
ChildProcess.leave(types.SimpleNamespace(context=context))
"""


def test_what_was_sent_last_arrives_although_its_sender_leaves(tmp_path: Path) -> None:
    """The wait is short if no peer reads."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = lifecycle_address(str(tmp_path))
    link = RouterChannel(context, address, HighWaterMark.WORKER_LINK)
    subprocess.run([sys.executable, "-c", LEAVER, address], check=True, timeout=60.0)
    deadline, arrived = time.monotonic() + TIMEOUT_S, 0
    while arrived < 8 and time.monotonic() < deadline:
        link.socket.poll(100)
        arrived += sum(1 for _ in link.drain(8))
    link.close()
    context.term()
    assert arrived == 8
