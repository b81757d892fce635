"""The client of the core for programs without an event loop; usable from any thread.

with EngineClient(client_address(run_dir)) as client:
    client.wait_ready(timeout_s=60)
    for output in client.submit([1, 2, 3], SamplingParams(max_tokens=8)):
        print(output.token_ids)
"""

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar, Unpack, cast

from protocol.api_core import ErrorCode, RequestError, RequestOutput, Status
from protocol.client.async_client import CONTROL_TIMEOUT_S, AsyncEngineClient
from protocol.client.errors import RequestFailed, failure_of
from protocol.client.ledger import RequestOptions
from protocol.client.request_stream import RequestStream, merge
from protocol.core_worker import ModelFacts
from protocol.sampling import SamplingParams

_CALL_TIMEOUT_S = 5.0
"""For calls that the loop answers at once."""
_CLOSE_TIMEOUT_S = 3.0
_JOIN_TIMEOUT_S = 1.0
"""With the above, less than the 5 s in which everything closes."""

P = ParamSpec("P")
T = TypeVar("T")


class SyncStream:
    """The tokens of one request: an iterator of `RequestOutput` for one thread at a time."""

    def __init__(self, client: "EngineClient", stream: RequestStream) -> None:
        self._client = client
        self._stream = stream
        self._outputs: list[RequestOutput] = []

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        try:
            return self._client.run(self._next(), timeout_s=None)
        except StopAsyncIteration:
            raise StopIteration from None

    def result(self, timeout_s: float) -> RequestOutput:
        """Wait for the end and return all tokens in one output, also those read before.

        After a TimeoutError call it again. RequestFailed: it has failed, or was cancelled.
        """
        return self._client.run(self._collect(), timeout_s)

    def cancel(self) -> None:
        """Abort the request. Idempotent."""
        self._client.call(self._stream.cancel)

    async def _next(self) -> RequestOutput:
        output = await self._stream.__anext__()
        self._outputs.append(output)
        return output

    async def _collect(self) -> RequestOutput:
        async for output in self._stream:
            self._outputs.append(output)
        if not self._outputs or self._outputs[-1].finish_reason is None:
            raise _failure("the request was cancelled")
        return merge(self._outputs)


def _blocking(
    control: Callable[Concatenate[AsyncEngineClient, P], Coroutine[Any, Any, bool]],
) -> "Callable[Concatenate[EngineClient, P], bool]":
    """Make a control of the asynchronous client one that waits for the answer."""

    @functools.wraps(control)
    def wait(client: "EngineClient", /, *args: P.args, **kwargs: P.kwargs) -> bool:
        timeout_s = cast(float, kwargs.get("timeout_s", CONTROL_TIMEOUT_S))
        work = control(client._client, *args, **kwargs)
        return client.run(work, timeout_s + 1.0)  # the control's own deadline comes first

    return wait


class EngineClient:
    """An `AsyncEngineClient` in a background thread with a loop of its own."""

    def __init__(self, address: str) -> None:
        """Connect to the core at `address`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._work, name="engine-client", daemon=True)
        self._lock = threading.Lock()
        self._is_open = True
        try:
            self._thread.start()
        except RuntimeError:  # the system has no room for a thread
            self._loop.close()
            raise
        self._client = AsyncEngineClient(address)
        try:
            self.run(self._client.start(), _CALL_TIMEOUT_S)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "EngineClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_ready(self, timeout_s: float) -> ModelFacts:
        """Wait until the engine serves; TimeoutError past `timeout_s`."""
        return self.run(self._client.wait_ready(timeout_s), timeout_s + 1.0)

    def submit(
        self, prompt_token_ids: list[int], params: SamplingParams, **options: Unpack[RequestOptions]
    ) -> SyncStream:
        """As `AsyncEngineClient.submit`."""

        async def submit() -> RequestStream:
            return self._client.submit(prompt_token_ids, params, **options)

        return SyncStream(self, self.run(submit(), _CALL_TIMEOUT_S))

    pause = _blocking(AsyncEngineClient.pause)
    resume = _blocking(AsyncEngineClient.resume)
    sleep = _blocking(AsyncEngineClient.sleep)
    wake_up = resume
    reset_prefix_cache = _blocking(AsyncEngineClient.reset_prefix_cache)

    @property
    def status(self) -> Status | None:
        """The core's last status."""
        return self._client.status

    def close(self) -> None:
        """Disconnect and end the thread; calls of other threads fail. Idempotent.

        TimeoutError: the client's loop is blocked; its thread ends when that is over.
        """
        with self._lock:
            if not self._is_open:
                return
            self._is_open = False
            closing = asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop)
            closing.add_done_callback(lambda _: self._loop.call_soon_threadsafe(self._loop.stop))
        closing.result(_CLOSE_TIMEOUT_S)
        self._thread.join(_JOIN_TIMEOUT_S)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Run a coroutine in the client's loop; past `timeout_s` it is cancelled."""
        with self._lock:  # work that enters the loop before its shutdown is cancelled by it
            if not self._is_open:
                work.close()
                raise _failure("the client is closed")
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise _failure("the client was closed") from None
        except BaseException:
            future.cancel()
            raise

    def call(self, function: Callable[[], None]) -> None:
        """Let the loop call a function soon; does nothing if the client is closed."""
        with self._lock:
            if self._is_open:
                self._loop.call_soon_threadsafe(function)

    def _work(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    async def _shut_down(self) -> None:
        await self._client.close()
        # Tasks that read streams end by themselves now; all others are cancelled.
        await asyncio.sleep(0)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _failure(message: str) -> RequestFailed:
    return failure_of(RequestError(ErrorCode.INTERNAL, message))
