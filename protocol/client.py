"""The asynchronous client of the core: submit prompts, iterate over tokens, cancel.

    async with AsyncEngineClient(client_address(run_dir)) as client:
        await client.wait_ready(timeout_s=60)
        async for output in client.submit([1, 2, 3], SamplingParams(max_tokens=8)):
            print(output.token_ids)

It survives restarts of the core and of the workers: open requests are sent again from the ledger,
and their streams go on. It touches no signals, environment, logging or foreign event loop.
"""

import asyncio
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import chain
from typing import TypeVar

import zmq

from protocol.api_core import (
    AddRequest,
    ClientToCore,
    Connect,
    EngineState,
    ErrorCode,
    Refused,
    RequestError,
    RequestOutput,
    Status,
    StepOutputs,
    decode_from_core,
    validate_request,
)
from protocol.channel import DealerChannel, HighWaterMark, LinkEvent
from protocol.core_worker import ModelFacts
from protocol.ledger import Ledger, RequestFailed
from protocol.message import ProtocolError, encode
from protocol.sampling import SamplingParams

MAX_OPEN_REQUESTS = 16384
STALL_TIMEOUT_S = 120.0
_DRAIN_LIMIT = 64
_RETRY_S = 0.01
_TICK_S = 1.0
_UNKNOWN_EPOCH = 0

T = TypeVar("T")


class RequestStream:
    """The tokens of one request: an asynchronous iterator of `RequestOutput`.

    What arrives while nobody reads is merged into one output: a slow reader gets fewer of them.
    The last output carries `finish_reason`. A refused or failed request raises `RequestFailed`.
    """

    def __init__(self, client: "AsyncEngineClient", request_id: int) -> None:
        self.request_id = request_id
        self._client = client
        self._pending: list[RequestOutput] = []
        self._error: RequestFailed | None = None
        self._finished = False
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self._finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output, self._pending = merge(self._pending), []
        self._finished = self._finished or output.finish_reason is not None
        return output

    def cancel(self) -> None:
        """Abort the request; iteration ends. Harmless at any time, also repeatedly."""
        self._finished = True
        self._pending = []
        self._client.cancel(self.request_id)
        self._wake()

    def deliver(self, output: RequestOutput) -> None:
        """Called by the client with what is new."""
        if not self._finished:
            self._pending.append(output)
            self._wake()

    def fail(self, error: RequestFailed) -> None:
        """Called by the client: nothing more will come."""
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def merge(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Join consecutive outputs of one request."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return first

    def join(columns: Iterable[list[T] | None]) -> list[T] | None:
        return list(chain.from_iterable(column or () for column in columns)) or None

    cached = (output.num_cached_tokens for output in outputs)
    return RequestOutput(
        first.request_id,
        first.first_index,
        list(chain.from_iterable(output.token_ids for output in outputs)),
        last.finish_reason,
        last.stop_token_id,
        next((count for count in cached if count is not None), None),
        join(output.logprobs for output in outputs),
        join(output.prompt_logprobs for output in outputs),
    )


class AsyncEngineClient:
    """A client inside the event loop in which `start` was awaited. Not thread-safe."""

    def __init__(
        self,
        address: str,
        *,
        max_open_requests: int = MAX_OPEN_REQUESTS,
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        """Name the core's address (`protocol.channel.client_address`); nothing connects yet.

        Args:
            max_open_requests: past it `submit` refuses.
            stall_timeout_s: without a core for so long, open requests fail.
        """
        self._address = address
        self._stall_timeout_s = stall_timeout_s
        self._ledger = Ledger(max_open_requests)
        self._streams: dict[int, RequestStream] = {}
        self._outbox: deque[bytes] = deque()
        self._epoch = _UNKNOWN_EPOCH
        self._lost_at = time.monotonic()
        self._status_event = asyncio.Event()
        self.facts: ModelFacts | None = None
        """What is known of the model; stays known while the engine recovers."""
        self.status: Status | None = None
        """The core's last word about itself."""
        self.last_status_time = 0.0
        """When it came, on the monotonic clock."""
        self.connected = False

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._channel = DealerChannel(self._context, self._address, HighWaterMark.CLIENT_LINK)
        self._monitor_fd = int(self._channel.monitor.getsockopt(zmq.FD))
        self._channel_fd = self._channel.fd
        self._loop.add_reader(self._channel_fd, self._on_readable)
        self._loop.add_reader(self._monitor_fd, self._on_link_events)
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        self._on_link_events()

    async def __aenter__(self) -> "AsyncEngineClient":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Disconnect; the core aborts what is still open. Open streams fail."""
        if not hasattr(self, "_channel") or self._channel.socket.closed:
            return
        self._loop.remove_reader(self._channel_fd)
        self._loop.remove_reader(self._monitor_fd)
        self._timer.cancel()
        for request_id in list(self._streams):
            self.cancel(request_id)
        self._fail_all("the client was closed")
        self._channel.close()
        self._context.term()

    async def wait_ready(self, timeout_s: float) -> ModelFacts:
        """Wait until the engine serves.

        Raises:
            TimeoutError: it does not within `timeout_s`.
        """
        async with asyncio.timeout(timeout_s):
            while self.facts is None or not self.connected:
                self._status_event.clear()
                await self._status_event.wait()
        return self.facts

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> RequestStream:
        """Accept a request: from here on it survives restarts of everything but this process.

        Raises:
            RequestFailed: the model cannot serve it, or the engine takes no requests now.
        """
        if self.status is None or self.facts is None:
            message = "the engine is starting"
            raise RequestFailed(RequestError(ErrorCode.OVERLOADED, message))
        if self.status.state is EngineState.DRAINING:
            raise RequestFailed(RequestError(ErrorCode.DRAINING, "the engine is shutting down"))
        request_id = self._ledger.next_request_id()
        add = AddRequest(
            request_id, prompt_token_ids, params, [], priority, time.time(), cache_salt
        )
        error = validate_request(add, self.facts)
        if error is not None:
            raise RequestFailed(error)
        self._ledger.accept(add)
        stream = self._streams[request_id] = RequestStream(self, request_id)
        if self._epoch != _UNKNOWN_EPOCH:
            self._send(add)
        return stream

    def cancel(self, request_id: int) -> None:
        """Abort a request, if it is open."""
        self._streams.pop(request_id, None)
        abort = self._ledger.cancel(request_id)
        if abort is not None and self._epoch != _UNKNOWN_EPOCH:
            self._send(abort)

    def _send(self, message: ClientToCore) -> None:
        body = encode(message)
        if self._outbox or not self._channel.send(self._epoch, body):
            if not self._outbox:
                self._loop.call_later(_RETRY_S, self._flush)
            self._outbox.append(body)
            return
        # The descriptor is edge-triggered: sending may have swallowed the sign of an arrival.
        self._loop.call_soon(self._on_readable)

    def _flush(self) -> None:
        """Send what a full queue held back. A lost connection empties the outbox instead."""
        while self._outbox and self._channel.send(self._epoch, self._outbox[0]):
            self._outbox.popleft()
        if self._outbox:
            self._loop.call_later(_RETRY_S, self._flush)

    def _on_link_events(self) -> None:
        if self._channel.socket.closed:
            return
        for event in self._channel.link_events():
            self._outbox.clear()
            self._epoch = _UNKNOWN_EPOCH
            self.connected = False
            self._lost_at = time.monotonic()
            if event is LinkEvent.CONNECTED:
                self._channel.send(_UNKNOWN_EPOCH, encode(Connect(os.getpid())))
        self._on_readable()

    def _on_readable(self) -> None:
        if self._channel.socket.closed:
            return
        num_read = 0
        for received in self._channel.drain(_DRAIN_LIMIT):
            num_read += 1
            try:
                message = decode_from_core(received.body)
            except ProtocolError:
                self._channel.num_bad_frames += 1
                continue
            if isinstance(message, Status):
                self._on_status(message, received.header.epoch)
            elif received.header.epoch != self._epoch:
                continue
            elif isinstance(message, StepOutputs):
                for output in message.outputs:
                    self._on_output(output)
            else:
                self._on_refused(message)
        if num_read:
            self._loop.call_soon(self._on_readable)

    def _on_status(self, status: Status, epoch: int) -> None:
        self.status = status
        self.last_status_time = time.monotonic()
        if status.facts is not None:
            self.facts = status.facts
            self.connected = True
            if epoch != self._epoch:
                self._resynchronize(epoch)
        self._status_event.set()

    def _resynchronize(self, epoch: int) -> None:
        """A core that serves and knows nothing of this client gets everything open."""
        self._epoch = epoch
        for add in self._ledger.open_requests():
            self._send(add)

    def _on_output(self, output: RequestOutput) -> None:
        try:
            news = self._ledger.take(output)
        except RequestFailed as error:
            self._fail(output.request_id, error)
            return
        if isinstance(news, AddRequest):
            self._send(news)
        elif news is not None:
            stream = self._streams[news.request_id]
            if news.finish_reason is not None:
                del self._streams[news.request_id]
            stream.deliver(news)

    def _on_refused(self, refused: Refused) -> None:
        if refused.request_id is not None and self._ledger.fail(refused.request_id):
            self._fail(refused.request_id, RequestFailed(refused.error))

    def _fail(self, request_id: int, error: RequestFailed) -> None:
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            stream.fail(error)

    def _fail_all(self, message: str) -> None:
        error = RequestFailed(RequestError(ErrorCode.INTERNAL, message))
        for request_id in list(self._streams):
            self._ledger.fail(request_id)
            self._fail(request_id, error)

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        if not self.connected and time.monotonic() - self._lost_at > self._stall_timeout_s:
            self._fail_all(f"no engine for {self._stall_timeout_s:.0f} s")
