"""The client of the core for programs without an event loop; usable from any thread.

with EngineClient(client_address(run_dir)) as client:
    client.wait_ready(timeout_s=60)
    for output in client.submit([1, 2, 3], SamplingParams(max_tokens=8)):
        print(output.token_ids)
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import Any, TypeVar

from protocol.api_core import RequestOutput, Status
from protocol.client import AsyncEngineClient, RequestStream, merge
from protocol.core_worker import ModelFacts
from protocol.sampling import SamplingParams

T = TypeVar("T")


class SyncStream:
    """The tokens of one request, for threads: an iterator of `RequestOutput`."""

    def __init__(self, client: "EngineClient", stream: RequestStream) -> None:
        self._client = client
        self._stream = stream

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __next__(self) -> RequestOutput:
        try:
            return self._client.run(self._stream.__anext__(), timeout_s=None)
        except StopAsyncIteration:
            raise StopIteration from None

    def result(self, timeout_s: float) -> RequestOutput:
        """All tokens in one output.

        Raises:
            TimeoutError: the request has not ended within `timeout_s`; it goes on.
            RequestFailed: as the iterator.
        """

        async def collect() -> RequestOutput:
            outputs = [output async for output in self._stream]
            assert outputs, "the request was cancelled"
            return merge(outputs)

        return self._client.run(collect(), timeout_s)

    def cancel(self) -> None:
        """Abort the request."""
        self._client.call(self._stream.cancel)


class EngineClient:
    """An `AsyncEngineClient` in a background thread with a loop of its own."""

    def __init__(self, address: str) -> None:
        """Connect to the core at `address`."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="engine-client", daemon=True
        )
        self._thread.start()
        self._client = AsyncEngineClient(address)
        self.run(self._client.start(), timeout_s=5.0)

    def __enter__(self) -> "EngineClient":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def wait_ready(self, timeout_s: float) -> ModelFacts:
        """Wait until the engine serves; TimeoutError past `timeout_s`."""
        return self.run(self._client.wait_ready(timeout_s), timeout_s + 1.0)

    def submit(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> SyncStream:
        """As `AsyncEngineClient.submit`."""

        async def submit() -> RequestStream:
            return self._client.submit(
                prompt_token_ids, params, priority=priority, cache_salt=cache_salt
            )

        return SyncStream(self, self.run(submit(), timeout_s=5.0))

    @property
    def status(self) -> Status | None:
        """The core's last word about itself."""
        return self._client.status

    def close(self) -> None:
        """Disconnect and end the thread; harmless when repeated."""
        if self._loop.is_closed():
            return
        self.run(self._client.close(), timeout_s=5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5.0)
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Run a coroutine in the client's loop and wait for it."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def call(self, function: Callable[[], None]) -> None:
        """Have the loop call a function soon."""
        self._loop.call_soon_threadsafe(function)
