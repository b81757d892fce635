"""A core without an engine: it records what clients send, and sends what a test asks for."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import zmq

from protocol.api_core import (
    AbortRequests,
    AddRequest,
    Connect,
    Control,
    ControlDone,
    CoreToClient,
    EngineState,
    EngineStats,
    PauseMode,
    RequestOutput,
    Status,
    StepOutputs,
    decode_from_client,
)
from protocol.client import AsyncEngineClient
from protocol.kv_events import SubscribeKVEvents, UnsubscribeKVEvents
from protocol.message import Message, encode
from protocol.model_facts import ModelFacts
from protocol.process.run_dir import client_address
from protocol.transport.channel import HighWaterMark, PeerGone, Received, RouterChannel

FAST_TICK_S = 0.02
"""Period of the status reports under the fixture `fast_ticks`."""
REPORT_S = 1.0
"""Period of a core's status reports: without them a client connects again."""
TIMEOUT_S = 30.0
FACTS = ModelFacts("fake", 1000, 4096, 16, 1000, [2], embedding_size=3)
READY = Status(EngineState.READY, FACTS, EngineStats())
RECOVERING = Status(EngineState.RECOVERING, FACTS, EngineStats())
STARTING = Status(EngineState.STARTING, None, EngineStats())


class FakeCore:
    """Works only while `pump` is called: by `until` in a test, or by the thread of `serving`."""

    def __init__(self, run_dir: str, epoch: int = 1) -> None:
        self.address = client_address(run_dir)
        self.epoch = epoch
        self.status = READY
        """The newest one; it answers `Connect`, and is repeated by `report`."""
        self.answers = True
        """Whether Connect is answered."""
        self.on_add: Callable[[FakeCore, AddRequest], None] = lambda core, add: None
        self.connects: list[bytes] = []
        """The peer of each Connect, in order."""
        self.adds: list[AddRequest] = []
        self.aborted: list[int] = []
        self.controls: list[Control] = []
        self.subscriptions: list[SubscribeKVEvents | UnsubscribeKVEvents] = []
        self.received: list[Message] = []
        """All messages of the right epoch, in order."""
        self.num_fenced = 0
        self._next_report = time.monotonic() + REPORT_S
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.link = RouterChannel(self._context, self.address, HighWaterMark.CLIENT_LINK)

    def __enter__(self) -> "FakeCore":
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()
        self._context.term()

    @property
    def num_added(self) -> int:
        return len(self.adds)

    def pump(self) -> None:
        for received in self.link.drain(10_000):
            self._on_frame(received)

    def report(self) -> None:
        """Send the status to the newest client if a report is due, as a core does."""
        if self.connects and self.answers and time.monotonic() >= self._next_report:
            self._next_report = time.monotonic() + REPORT_S
            with contextlib.suppress(PeerGone):
                self.send(self.status)

    def _on_frame(self, received: Received) -> None:
        message = decode_from_client(received.body)
        if isinstance(message, Connect):
            self.connects.append(received.peer)
            if self.answers:
                with contextlib.suppress(PeerGone):  # it may have replaced its socket meanwhile
                    self.send(self.status)
        elif received.header.epoch != self.epoch:
            self.num_fenced += 1
        else:
            self._handle(message)

    def _handle(self, message: Message) -> None:
        self.received.append(message)
        if isinstance(message, AddRequest):
            self.adds.append(message)
            self.on_add(self, message)
        elif isinstance(message, AbortRequests):
            self.aborted += message.request_ids
        elif isinstance(message, Control):
            self.controls.append(message)
        elif isinstance(message, SubscribeKVEvents | UnsubscribeKVEvents):
            self.subscriptions.append(message)

    def done(self, pause_mode: PauseMode, *, ok: bool = True) -> None:
        """Answer the newest control."""
        self.send(ControlDone(self.controls[-1].number, ok, pause_mode))

    def send(self, message: CoreToClient, epoch: int | None = None) -> None:
        if isinstance(message, Status):
            self.status = message
        self.send_raw(encode(message), epoch)

    def send_raw(self, body: bytes, epoch: int | None = None) -> None:
        assert self.link.send(self.connects[-1], self.epoch if epoch is None else epoch, body)

    def emit(self, *outputs: RequestOutput) -> None:
        """Send outputs; like a core, drop those for a client that has gone."""
        with contextlib.suppress(PeerGone):
            self.send(StepOutputs(list(outputs)))

    async def restart(self, num_adds: int) -> None:
        """Restart on the same socket under a new epoch, and wait for this number of requests."""
        self.epoch += 1
        for kept in (self.adds, self.controls, self.subscriptions, self.received):
            kept.clear()
        self.send(READY)
        await self.until(lambda: self.num_added >= num_adds)

    async def until(self, condition: Callable[[], object]) -> None:
        """Pump until `condition` holds."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self.pump()
                self.report()
                await asyncio.sleep(0.001)


class ServingThread:
    """Pumps a core in a thread, with periodic reports, while the context is open."""

    def __init__(self, core: FakeCore) -> None:
        self._core = core
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "a socket has one thread at a time"

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._core.link.socket.poll(10)
            self._core.pump()
            self._core.report()


def run_connected(
    core: FakeCore, play: Callable[[AsyncEngineClient], Awaitable[None]], **options: Any
) -> None:
    """Run a test with a client that is connected to the core."""

    async def main() -> None:
        async with (
            asyncio.timeout(2 * TIMEOUT_S),
            AsyncEngineClient(core.address, **options) as client,
        ):
            await core.until(lambda: client.connected)
            await play(client)

    asyncio.run(main())
