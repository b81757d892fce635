"""The asynchronous client of the core: submit prompts, iterate over tokens, cancel.

    async with AsyncEngineClient(client_address(run_dir)) as client:
        await client.wait_ready(timeout_s=60)
        async for output in client.submit([1, 2, 3], SamplingParams(max_tokens=8)):
            print(output.token_ids)

It survives restarts of the core and of the workers: open requests are sent again from the ledger,
and their streams go on. It touches no signals, environment, logging or foreign event loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import chain
from typing import TypeVar

from protocol.api_core import (
    AbortRequests,
    AddRequest,
    EngineState,
    ErrorCode,
    Refused,
    RequestError,
    RequestOutput,
    Status,
    StepOutputs,
)
from protocol.channel import MAX_FRAME_BYTES
from protocol.core_link import TICK_S, CoreLink
from protocol.core_worker import ModelFacts
from protocol.ledger import Ledger, RequestFailed, check_request
from protocol.message import encode
from protocol.sampling import SamplingParams

MAX_OPEN_REQUESTS = 16384
STALL_TIMEOUT_S = 120.0
_SERVING = (EngineState.READY, EngineState.DRAINING)

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
            stall_timeout_s: without an engine that serves for so long, open requests fail.
        """
        self._stall_timeout_s = stall_timeout_s
        self._stalled_s = 0.0
        self._ledger = Ledger(max_open_requests)
        self._streams: dict[int, RequestStream] = {}
        self._link = CoreLink(address, 2 * max_open_requests, self._on_status, self._on_message)
        self._status_event = asyncio.Event()
        self.facts: ModelFacts | None = None
        """What is known of the model; stays known while the engine recovers."""
        self.status: Status | None = None
        """The core's last word about itself."""
        self.last_status_time = 0.0
        """When it came, on the monotonic clock."""

    @property
    def connected(self) -> bool:
        """Whether the core is heard and takes messages; it may be recovering nevertheless."""
        return self._link.is_agreed

    @property
    def num_fenced_frames(self) -> int:
        """Frames of another incarnation of the core, dropped."""
        return self._link.num_fenced_frames

    @property
    def num_bad_frames(self) -> int:
        """Frames with a body that could not be decoded, dropped."""
        return self._link.num_bad_frames

    async def start(self) -> None:
        """Begin to connect; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._link.open()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    async def __aenter__(self) -> "AsyncEngineClient":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Disconnect; open streams fail, and the core aborts them. Harmless when repeated."""
        if not self._link.is_open:
            return
        self._timer.cancel()
        self._fail_all(RequestError(ErrorCode.INTERNAL, "the client was closed"))
        self._link.close()

    async def wait_ready(self, timeout_s: float) -> ModelFacts:
        """Wait until the engine serves: its state is READY.

        Raises:
            TimeoutError: it does not within `timeout_s`.
        """
        async with asyncio.timeout(timeout_s):
            while (facts := self._ready_facts()) is None:
                self._status_event.clear()
                await self._status_event.wait()
        return facts

    def _ready_facts(self) -> ModelFacts | None:
        status = self.status
        is_ready = self.connected and status is not None and status.state is EngineState.READY
        return self.facts if is_ready else None

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
            RequestFailed: a value is out of its bounds, the model cannot serve the request, or the
                engine takes none now.
        """
        error = self._why_not()
        if error is not None:
            raise RequestFailed(error)
        assert self.facts is not None
        request_id = self._ledger.next_request_id()
        add = AddRequest(
            request_id, prompt_token_ids, params, [], priority, time.time(), cache_salt
        )
        add, body = check_request(add, self.facts)
        self._ledger.accept(add)
        stream = self._streams[request_id] = RequestStream(self, request_id)
        self._link.send(body)
        return stream

    def _why_not(self) -> RequestError | None:
        if not self._link.is_open:
            return RequestError(ErrorCode.INTERNAL, "the client is not open")
        if self.status is None or self.facts is None:
            return RequestError(ErrorCode.OVERLOADED, "the engine is starting")
        if self._stalled_s > self._stall_timeout_s:
            return RequestError(ErrorCode.OVERLOADED, self._stall_text())
        if self.status.state is EngineState.DRAINING:
            return RequestError(ErrorCode.DRAINING, "the engine is shutting down")
        return None

    def cancel(self, request_id: int) -> None:
        """Abort a request, if it is open."""
        self._streams.pop(request_id, None)
        abort = self._ledger.cancel(request_id)
        if abort is not None:
            self._link.send(encode(abort))

    def _on_status(self, status: Status, is_new_epoch: bool) -> None:
        self.status = status
        self.last_status_time = time.monotonic()
        if status.facts is not None:
            self.facts = status.facts
        if status.state in _SERVING:
            self._stalled_s = 0.0
        self._ledger.allow_repairs()
        if is_new_epoch:  # a core that knows nothing of this client gets everything open
            for add in list(self._ledger.open_requests()):
                self._resend(add)
        self._status_event.set()

    def _on_message(self, message: StepOutputs | Refused) -> None:
        if isinstance(message, StepOutputs):
            for output in message.outputs:
                self._on_output(output)
        elif message.request_id is None:
            # What was sent obeys the bounds of this side's protocol, so the core has another one.
            self._fail_all(message.error)
        elif self._ledger.fail(message.request_id):
            self._streams.pop(message.request_id).fail(RequestFailed(message.error))

    def _on_output(self, output: RequestOutput) -> None:
        try:
            news = self._ledger.take(output)
        except RequestFailed as failure:
            self._give_up(output.request_id, failure.error)
            return
        if isinstance(news, AddRequest):
            self._resend(news)
        elif news is not None:
            stream = self._streams[news.request_id]
            if news.finish_reason is not None:
                del self._streams[news.request_id]
            stream.deliver(news)

    def _resend(self, add: AddRequest) -> None:
        body = encode(add)
        if len(body) <= MAX_FRAME_BYTES:
            self._link.send(body)
            return
        message = f"{len(body)} bytes to send again exceed the {MAX_FRAME_BYTES} of a frame"
        self._give_up(add.request_id, RequestError(ErrorCode.TOO_LONG, message))

    def _give_up(self, request_id: int, error: RequestError) -> None:
        """Fail one request here and end it in the core."""
        self._ledger.fail(request_id)
        self._streams.pop(request_id).fail(RequestFailed(error))
        self._link.send(encode(AbortRequests([request_id])))

    def _fail_all(self, error: RequestError) -> None:
        streams, self._streams = self._streams, {}
        for request_id, stream in streams.items():
            self._ledger.fail(request_id)
            stream.fail(RequestFailed(error))
        if streams:
            self._link.send(encode(AbortRequests(list(streams))))

    def _tick(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self._stalled_s += TICK_S  # ticks and not the clock, as in the link
        if self._stalled_s > self._stall_timeout_s and self._streams:
            self._fail_all(RequestError(ErrorCode.INTERNAL, self._stall_text()))
        self._link.tick()

    def _stall_text(self) -> str:
        return f"no engine has served for {self._stall_timeout_s:.0f} s"
