"""A client process: the real AsyncEngineClient on an event loop in virtual time."""

import asyncio
import contextlib
import contextvars
import heapq
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, cast

from protocol.client import AsyncEngineClient, ReplicatedClient
from protocol.client.core_link import CoreLink
from protocol.client.errors import RequestFailed
from protocol.client.request_stream import RequestStream
from protocol.config import EngineConfig
from tests.simulation.child import CLIENT_ADDRESS, SimulatedChild
from tests.simulation.oracle import Oracle, Stream
from tests.simulation.plan import RequestPlan
from tests.simulation.sockets import make_context
from tests.simulation.wire import Wire
from tests.simulation.world import SECOND, KilledHere, Process, Violation

_RETRY_S = 0.2
_LONGEST_WAIT_S = 1000.0


class _Timer:
    """The handle that `call_later` returns."""

    __slots__ = ("arguments", "callback", "is_cancelled")

    def __init__(self, callback: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        self.callback = callback
        self.arguments = arguments
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True


class SimulatedLoop:
    """As much of an asyncio event loop as the client, its link and its tasks use."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._ready: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self._timers: list[tuple[int, int, _Timer]] = []
        self._num_timers = 0
        self.readers: dict[int, Callable[[], None]] = {}
        self.is_killed = False
        """A task was killed at a failpoint; the task swallows what is raised in it."""

    def turn(self) -> int | None:
        """Run all callbacks that are due; returns the time of the next timer."""
        timers, ready = self._timers, self._ready
        while timers and timers[0][0] <= self._process.busy_until:
            timer = heapq.heappop(timers)[2]
            if not timer.is_cancelled:
                ready.append((timer.callback, timer.arguments))
        while ready:
            callback, arguments = ready.popleft()
            callback(*arguments)
            if self.is_killed:
                raise KilledHere
        return timers[0][0] if timers else None

    def arrived(self, fd: int) -> None:
        """Schedule the reader of a descriptor, which is edge-triggered."""
        reader = self.readers.get(fd)
        if reader is not None:
            self._ready.append((reader, ()))

    # The interface of asyncio ---------------------------------------------------------------------

    def call_soon(
        self,
        callback: Callable[..., None],
        *arguments: Any,
        context: contextvars.Context | None = None,
    ) -> None:
        """Schedule a callback; the handle that a real loop returns is not used here."""
        self._ready.append((callback, arguments))

    def call_later(self, delay: float, callback: Callable[..., None], *arguments: Any) -> _Timer:
        timer = _Timer(callback, arguments)
        self._num_timers += 1
        due = self._process.world.local_time + int(delay * SECOND)
        heapq.heappush(self._timers, (due, self._num_timers, timer))
        return timer

    def call_soon_threadsafe(self, callback: Callable[..., None], *arguments: Any) -> None:
        self._ready.append((callback, arguments))
        self._process.wake()

    def create_task(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        assert isinstance(self._process, ClientProcess)
        return self._process.run(coroutine)

    def call_at(self, when: float, callback: Callable[..., None], *arguments: Any) -> _Timer:
        return self.call_later(when - self.time(), callback, *arguments)

    def time(self) -> float:
        return self._process.world.seconds()

    def create_future(self) -> "asyncio.Future[Any]":
        return asyncio.Future(loop=cast(asyncio.AbstractEventLoop, self))

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return not self._process.is_alive

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ignore it: the tasks here handle their exceptions, and killed clients drop theirs."""

    def add_reader(self, fd: int, callback: Callable[[], None]) -> None:
        self.readers[fd] = callback

    def remove_reader(self, fd: int) -> None:
        self.readers.pop(fd, None)


class ClientProcess(Process):
    """Submits the planned requests, reads every stream, and cancels the planned ones."""

    def __init__(
        self,
        wire: Wire,
        name: str,
        plans: list[RequestPlan],
        oracle: Oracle,
        connect: Callable[[Process], SimulatedChild] | None = None,
        *,
        start_s: float = 0.0,
        make_engine: Callable[..., AsyncEngineClient | ReplicatedClient] | None = None,
    ) -> None:
        """`connect` creates the link to a supervisor, where there is one.

        `make_engine` takes what `AsyncEngineClient` does but for an address.
        """
        super().__init__(wire.world, name)
        self._wire = wire
        self._oracle = oracle
        self._plans = plans
        make_link = partial(
            CoreLink,
            make_context=lambda: make_context(wire, self),
            getpid=lambda: self.pid,
        )
        make = make_engine or partial(AsyncEngineClient, CLIENT_ADDRESS)
        self.engine = make(clock=self.world.clock, make_link=make_link)
        self._loop = SimulatedLoop(self)
        self._as_asyncio = cast(asyncio.AbstractEventLoop, self._loop)
        self._to_retry: list[RequestPlan] = []
        self._coroutines: list[Coroutine[Any, Any, None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_started = self._is_leaving = self._is_drained = False
        self._starts_at = self.world.now + int(start_s * SECOND)
        self._child = None if connect is None else connect(self)
        self.on_death.append(self._abandon)
        self.wake(self._starts_at)

    def turn(self) -> int | None:
        asyncio._set_running_loop(self._as_asyncio)
        try:
            if self._child is not None:
                self._child.messages()
            if not self._is_started:
                if self.world.now < self._starts_at:
                    return self._starts_at
                self._start()
            due = self._loop.turn()
            self._follow_commands()
            return due
        finally:
            asyncio._set_running_loop(None)

    def _follow_commands(self) -> None:
        """Drain or exit when the supervisor asks for it."""
        child = self._child
        if child is None:
            return
        if child.has_stop:
            self.world.at(self.busy_until, self.die, 0)
        elif child.drain is not None and child.drain.is_replaced:
            if not self._is_leaving:
                self._is_leaving = True
                self.retire()
            if self.has_finished and self.flush_for_successor():
                self.world.at(self.busy_until, self.die, 0)
        elif child.drain is not None and self.has_finished and not self._is_drained:
            self._is_drained = True
            child.drained()

    def retire(self) -> None:
        """Stop serving new requests: a successor is ready."""

    @property
    def has_finished(self) -> bool:
        """Return whether no request is open."""
        return not self.engine.num_open_requests

    def flush_for_successor(self) -> bool:
        """Flush state for a successor; returns whether that is complete."""
        return True

    def _start(self) -> None:
        self._is_started = True
        with contextlib.suppress(StopIteration):
            self.engine.start().send(None)
        if self._child is not None:
            self.run(self._report_ready(self._child))
            self._child.messages()
        self._beat()
        self.begin()

    async def _report_ready(self, child: SimulatedChild) -> None:
        await self.engine.wait_ready(_LONGEST_WAIT_S)
        self.is_dispensable = False
        child.ready()

    def begin(self) -> None:
        """Start the work of this process; its engine client has been started."""
        for plan in self._plans:
            delay_s = max(0.0, plan.time_s - self._oracle.elapsed_s)
            self._loop.call_later(delay_s, self._submit, plan)

    @property
    def config(self) -> EngineConfig:
        assert self._child is not None
        return self._child.config

    def _beat(self) -> None:
        """Report progress periodically, as a living event loop does."""
        reporter = None if self._child is None else self._child.reporter
        if reporter is not None and reporter.tick_ms is not None:
            reporter.idle()
            self._loop.call_later(reporter.tick_ms / 1000, self._beat)

    def _submit(self, plan: RequestPlan) -> None:
        if self._is_leaving or plan not in self._plans:  # another incarnation submits it
            return
        try:
            stream = self.engine.submit(
                plan.prompt,
                plan.params,
                priority=plan.priority,
                cache_salt=plan.salt,
                adapter=plan.adapter,
            )
        except RequestFailed:  # the engine is starting: nothing was accepted
            if not self._to_retry:
                self._loop.call_later(_RETRY_S, self._retry)
            self._to_retry.append(plan)
            return
        record = self._oracle.accepted(self.name, plan)
        reading = self._read(stream, record)
        self._plans.remove(plan)
        self._start_task(reading)
        if plan.cancel_after_s is not None:
            self._loop.call_later(plan.cancel_after_s, self._cancel, stream, record)

    def run(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        """Run a coroutine as a task that ends with this process."""
        task = self._start_task(self._guarded(coroutine))
        self._coroutines.append(coroutine)
        self.wake()
        return task

    async def _guarded(self, coroutine: Coroutine[Any, Any, None]) -> None:
        try:
            await coroutine
        except KilledHere:
            self._loop.is_killed = True
        except Violation as violation:
            self.world.fail(violation)
        except Exception as error:
            violation = Violation(f"{self.name} raised {type(error).__name__}: {error}")
            self.world.fail(violation)

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        self._coroutines.append(coroutine)
        task = asyncio.Task(coroutine, loop=self._as_asyncio)
        self._tasks.add(task)
        return task

    def _retry(self) -> None:
        plans, self._to_retry = self._to_retry, []
        for plan in plans:
            self._submit(plan)

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
        if self._child is None:  # a host is not restarted
            self._plans.clear()
        elif self.world.is_ending and not self.has_finished:
            self.world.fail(Violation(f"lost: {self.name} ends with requests open"))
        for coroutine in self._coroutines:
            coroutine.close()
        self._oracle.abandon(self.name)

    def arrived(self, fd: int) -> None:
        self._loop.arrived(fd)
        super().arrived(fd)
