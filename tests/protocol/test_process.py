"""A child's lifecycle link inside an event loop: no command of the supervisor stays unread."""

import argparse
import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from protocol import process
from protocol.channel import HighWaterMark, RouterChannel, lifecycle_address
from protocol.lifecycle import Drain, Hello, Ready, Role, Stop, decode_to_supervisor
from protocol.message import Message, encode
from protocol.process import ChildProcess
from protocol.settings import configure

TIMEOUT_S = 10.0
EPOCH = 4


class Bench:
    """A child in this process, and its supervisor's socket."""

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
    monkeypatch.setattr(process, "watch_parent", lambda parent_fd: None)
    running = Bench(str(tmp_path))
    yield running
    running.close()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[asyncio.AbstractEventLoop]:
    """A loop that is never told of a readable descriptor: as if each sign had been swallowed."""
    made = asyncio.new_event_loop()
    monkeypatch.setattr(made, "add_reader", lambda fd, callback: None)
    yield made
    made.close()


async def until_told(heard: list[Drain | Stop], count: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while len(heard) < count:
        assert time.monotonic() < deadline, f"{len(heard)} of {count} commands were delivered"
        await asyncio.sleep(0)


def wait_for_commands(child: ChildProcess) -> None:
    assert child.lifecycle_socket is not None
    assert child.lifecycle_socket.poll(int(TIMEOUT_S * 1000))


def test_whatever_is_said_looks_for_commands_too(
    bench: Bench, loop: asyncio.AbstractEventLoop
) -> None:
    heard: list[Drain | Stop] = []

    async def main() -> None:
        bench.child.attach_asyncio(loop, heard.append)
        await asyncio.sleep(0)  # the look at the start finds nothing
        bench.send(Drain())
        wait_for_commands(bench.child)
        bench.child.ready()
        await until_told(heard, 1)

    loop.run_until_complete(main())
    assert isinstance(heard[0], Drain)
    assert isinstance(bench.receive(), Ready)


def test_more_commands_than_one_look_takes_are_all_delivered(
    bench: Bench, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[Drain | Stop] = []
    arrived: list[Drain | Stop] = [Drain(), Stop(), Drain()]
    monkeypatch.setattr(bench.child, "messages", lambda: [arrived.pop()] if arrived else [])

    async def main() -> None:
        bench.child.attach_asyncio(loop, heard.append)
        await until_told(heard, 3)

    loop.run_until_complete(main())


def test_a_child_can_speak_after_its_loop_has_ended(
    bench: Bench, loop: asyncio.AbstractEventLoop
) -> None:
    bench.child.attach_asyncio(loop, lambda message: None)
    loop.close()
    bench.child.ready()
    assert isinstance(bench.receive(), Ready)


def test_commands_to_another_incarnation_are_dropped_and_counted(bench: Bench) -> None:
    """What was meant for a predecessor says nothing to this one."""
    heard: list[object] = []
    bench.send(Stop(), EPOCH - 1)
    bench.send(Stop(), EPOCH + 1)
    bench.send(Drain())
    deadline = time.monotonic() + TIMEOUT_S
    while not heard:
        assert time.monotonic() < deadline
        wait_for_commands(bench.child)
        heard += bench.child.messages()
    assert heard == [Drain()]
    assert bench.child.num_fenced_frames == 2
