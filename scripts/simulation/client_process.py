"""A client: the real AsyncEngineClient on an event loop in virtual time, with its readers."""

import asyncio
import contextlib
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, cast

from protocol.client import AsyncEngineClient
from protocol.errors import RequestFailed
from protocol.request_stream import RequestStream
from scripts.simulation.oracle import Oracle, Stream
from scripts.simulation.plan import RequestPlan
from scripts.simulation.sockets import Wire
from scripts.simulation.stand_ins import CLIENT_ADDRESS, SimulatedChild
from scripts.simulation.world import SECOND, Process, Violation

_RETRY_S = 0.2


class _Handle:
    """What `call_later` returns."""

    def __init__(self, callback: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self._callback: Callable[..., None] | None = callback
        self._arguments = arguments

    def cancel(self) -> None:
        self._callback = None

    def run(self) -> None:
        if self._callback is not None:
            self._callback(*self._arguments)


class SimulatedLoop:
    """As much of an asyncio event loop as the client, its link and its tasks use."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[int, int, _Handle]] = []
        self._num_timers = 0
        self.readers: dict[int, Callable[[], None]] = {}

    def turn(self) -> int | None:
        """Run what is due; returns when the next timer is."""
        timers = self._timers
        while timers and timers[0][0] <= self._process.busy_until:
            self._ready.append(heapq.heappop(timers)[2])
        while self._ready:
            self._ready.popleft().run()
        return timers[0][0] if timers else None

    def arrived(self, fd: int) -> None:
        """A descriptor has become readable: edge-triggered."""
        reader = self.readers.get(fd)
        if reader is not None:
            self.call_soon(reader)
        self._process.wake()

    # What asyncio's classes call ------------------------------------------------------------------

    def call_soon(
        self,
        callback: Callable[..., None],
        *arguments: Any,
        context: contextvars.Context | None = None,
    ) -> _Handle:
        handle = _Handle(callback, arguments)
        self._ready.append(handle)
        return handle

    def call_later(self, delay: float, callback: Callable[..., None], *arguments: Any) -> _Handle:
        handle = _Handle(callback, arguments)
        self._num_timers += 1
        due = self._process.world.local_time + int(delay * SECOND)
        heapq.heappush(self._timers, (due, self._num_timers, handle))
        return handle

    def time(self) -> float:
        return self._process.world.seconds()

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=cast(asyncio.AbstractEventLoop, self))

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return not self._process.is_alive

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Tasks here catch all that they may; one that is dropped with its client is no error."""

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        self.readers[fd] = callback

    def remove_reader(self, fd: int) -> None:
        self.readers.pop(fd, None)


class ClientProcess(Process):
    """Submits what is planned, reads every stream, and cancels what is to be cancelled."""

    def __init__(
        self,
        wire: Wire,
        name: str,
        plans: list[RequestPlan],
        oracle: Oracle,
        connect: Callable[[Process], SimulatedChild] | None = None,
    ) -> None:
        """`connect` makes the link to a supervisor, where there is one."""
        super().__init__(wire.world, name)
        self._wire = wire
        self._oracle = oracle
        self._plans = plans
        self._client = AsyncEngineClient(CLIENT_ADDRESS)
        self._loop = SimulatedLoop(self)
        self._readings: list[Coroutine[Any, Any, None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_started = False
        self._child = None if connect is None else connect(self)
        if self._child is not None:
            self._child.ready()
        self.on_death.append(self._abandon)
        self.wake()

    @property
    def num_to_submit(self) -> int:
        """Requests still to come."""
        return len(self._plans)

    def turn(self) -> int | None:
        asyncio._set_running_loop(cast(asyncio.AbstractEventLoop, self._loop))
        try:
            if not self._is_started:
                self._start()
            if self._child is not None:
                self._child.messages()
            return self._loop.turn()
        finally:
            asyncio._set_running_loop(None)

    def _start(self) -> None:
        self._is_started = True
        with contextlib.suppress(StopIteration):
            self._client.start().send(None)
        for plan in self._plans:
            delay_s = max(0.0, plan.time_s - self._oracle.elapsed_s)
            self._loop.call_later(delay_s, self._submit, plan)

    def _submit(self, plan: RequestPlan) -> None:
        try:
            stream = self._client.submit(
                plan.prompt, plan.params, priority=plan.priority, cache_salt=plan.salt
            )
        except RequestFailed:  # the engine is starting: nothing was accepted
            self._loop.call_later(_RETRY_S, self._submit, plan)
            return
        record = self._oracle.accepted(self.name, plan)
        reading = self._read(stream, record)
        self._plans.remove(plan)
        task = asyncio.Task(reading, loop=cast(asyncio.AbstractEventLoop, self._loop))
        self._readings.append(reading)
        self._tasks.add(task)
        if plan.cancel_after_s is not None:
            self._loop.call_later(plan.cancel_after_s, self._cancel, stream, record)

    async def _read(self, stream: RequestStream, record: Stream) -> None:
        try:
            async for output in stream:
                record.take(output)
        except RequestFailed as failure:
            record.failed(failure.error)
        except Violation as violation:
            self.world.fail(violation)

    def _cancel(self, stream: RequestStream, record: Stream) -> None:
        if record.is_open:
            record.cancelled()
            stream.cancel()

    def _abandon(self) -> None:
        if self._child is None:  # nobody starts it again
            self._plans.clear()
        for reading in self._readings:
            reading.close()
        self._oracle.abandon(self.name)

    def arrived(self, fd: int) -> None:
        self._loop.arrived(fd)

    def notice_death(self, process: Process, status: int) -> None:
        """A client has its connection to notice by."""
