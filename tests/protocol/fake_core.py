"""A core without an engine: it records what clients send, and says what a test has it say."""

import asyncio
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
from protocol.channel import HighWaterMark, PeerGone, Received, RouterChannel, client_address
from protocol.client import AsyncEngineClient
from protocol.core_link import STATUS_TIMEOUT_S
from protocol.core_worker import ModelFacts
from protocol.kv_events import SubscribeKVEvents, UnsubscribeKVEvents
from protocol.message import Message, encode

FAST_TICK_S = 0.02
"""A second under the fixture `fast_ticks`."""
FACTS = ModelFacts("fake", 1000, 4096, 16, 1000, [2])
READY = Status(EngineState.READY, FACTS, EngineStats())
RECOVERING = Status(EngineState.RECOVERING, FACTS, EngineStats())


class FakeCore:
    """Works only while somebody calls `pump`: a test by `until`, or a thread by `serving`."""

    def __init__(self, run_dir: str, epoch: int = 1) -> None:
        self.address = client_address(run_dir)
        self.epoch = epoch
        self.status = READY
        self.answers = True
        """Whether Connect is answered."""
        self.on_add: Callable[[FakeCore, AddRequest], None] = lambda core, add: None
        self.connects: list[bytes] = []
        """Peers, as often as they said Connect."""
        self.adds: list[AddRequest] = []
        self.aborted: list[int] = []
        self.controls: list[Control] = []
        self.subscriptions: list[SubscribeKVEvents | UnsubscribeKVEvents] = []
        self.heard: list[Message] = []
        """All that came under the right epoch, in order."""
        self.num_fenced = 0
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

    def _on_frame(self, received: Received) -> None:
        message = decode_from_client(received.body)
        if isinstance(message, Connect):
            self.connects.append(received.peer)
            if self.answers:
                self.say(self.status)
        elif received.header.epoch != self.epoch:
            self.num_fenced += 1
        else:
            self._obey(message)

    def _obey(self, message: Message) -> None:
        self.heard.append(message)
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
        self.say(ControlDone(self.controls[-1].number, ok, pause_mode))

    def say(self, message: CoreToClient, epoch: int | None = None) -> None:
        self.say_raw(encode(message), epoch)

    def say_raw(self, body: bytes, epoch: int | None = None) -> None:
        assert self.link.send(self.connects[-1], self.epoch if epoch is None else epoch, body)

    def emit(self, *outputs: RequestOutput) -> None:
        self.say(StepOutputs(list(outputs)))

    async def restart(self, num_adds: int) -> None:
        """Come back on the same socket under a new epoch, and be sent so many requests."""
        self.epoch += 1
        for kept in (self.adds, self.controls, self.subscriptions, self.heard):
            kept.clear()
        self.say(READY)
        await self.until(lambda: self.num_added >= num_adds)

    async def until(self, condition: Callable[[], object]) -> None:
        """Let everybody work until `condition` holds; not as long as the client's own patience."""
        async with asyncio.timeout(STATUS_TIMEOUT_S - 1.5):
            while not condition():
                self.pump()
                await asyncio.sleep(0.001)


class ServingThread:
    """Pumps a core in a thread, and reports each second, as long as the `with` lasts."""

    def __init__(self, core: FakeCore) -> None:
        self._core = core
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join(5.0)
        assert not self._thread.is_alive(), "a socket has one thread at a time"

    def _run(self) -> None:
        next_status = time.monotonic() + 1.0
        while not self._stopped.is_set():
            self._core.link.socket.poll(10)
            self._core.pump()
            if self._core.connects and time.monotonic() > next_status:
                next_status += 1.0
                try:
                    self._core.say(self._core.status)
                except PeerGone:
                    return


def run_connected(
    core: FakeCore, play: Callable[[AsyncEngineClient], Awaitable[None]], **options: Any
) -> None:
    """Play a scene with a client that has agreed with the core."""

    async def main() -> None:
        async with asyncio.timeout(20), AsyncEngineClient(core.address, **options) as client:
            await core.until(lambda: client.connected)
            await play(client)

    asyncio.run(main())
