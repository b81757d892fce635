"""The client of the core for programs without an event loop; usable from any thread.

with EngineClient(client_address(run_dir)) as client:
    client.wait_ready(timeout_s=60)
    for output in client.submit([1, 2, 3], SamplingParams(max_tokens=8)):
        print(output.token_ids)
"""

import functools
from array import array
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, Unpack, cast

from protocol.api_core import ErrorCode, RequestError, RequestOutput, Status
from protocol.client.async_client import CONTROL_TIMEOUT_S
from protocol.client.errors import failure_of
from protocol.client.ledger import RequestOptions
from protocol.client.loop_thread import LoopThread
from protocol.client.options import ReplicatedOptions
from protocol.client.replicated_client import ReplicatedClient
from protocol.client.request_stream import RequestStream, merge
from protocol.model_facts import ModelFacts
from protocol.sampling import Pooling, SamplingParams
from protocol.transport.curve import ClientKeys

_CALL_TIMEOUT_S = 5.0
"""Deadline for calls that the loop answers at once."""
_DEFAULTS = ReplicatedOptions()

P = ParamSpec("P")
T = TypeVar("T")


class SyncStream:
    """The tokens of one request: an iterator of `RequestOutput` for one thread at a time.

    As a context manager it aborts the request when its block is left.
    """

    def __init__(self, client: "EngineClient", stream: RequestStream) -> None:
        self._client = client
        self._stream = stream
        self._outputs: list[RequestOutput] = []

    def __iter__(self) -> Iterator[RequestOutput]:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def __next__(self) -> RequestOutput:
        try:
            return self._client.run(self._next(), timeout_s=None)
        except StopAsyncIteration:
            raise StopIteration from None

    def result(self, timeout_s: float) -> RequestOutput:
        """Wait for the end; return all tokens in one output, including those already read.

        May be called again after a TimeoutError. RequestFailed: the request has failed;
        RequestCancelled: it was cancelled.
        """
        return self._client.run(self._collect(), timeout_s)

    @property
    def resumed_inexactly(self) -> bool:
        """True if an engine with another fingerprint has continued earlier outputs."""
        return self._stream.resumed_inexactly

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
            error = RequestError(ErrorCode.ABORTED, "the request was cancelled")
            raise failure_of(error)
        return merge(self._outputs)


def _blocking(
    control: Callable[Concatenate[ReplicatedClient, P], Coroutine[Any, Any, bool]],
) -> "Callable[Concatenate[EngineClient, P], bool]":
    """Turn a control of the asynchronous client into one that waits for the answer."""

    @functools.wraps(control)
    def wait(client: "EngineClient", /, *args: P.args, **kwargs: P.kwargs) -> bool:
        timeout_s = cast(float, kwargs.get("timeout_s", CONTROL_TIMEOUT_S))
        work = control(client._client, *args, **kwargs)
        return client.run(work, timeout_s + 1.0)  # the control's own deadline comes first

    return wait


class EngineClient:
    """A `ReplicatedClient` in a background thread with its own event loop."""

    def __init__(
        self,
        address: str | Sequence[str],
        options: ReplicatedOptions = _DEFAULTS,
        *,
        keys: ClientKeys | None = None,
        **fields: Any,
    ) -> None:
        """Connect to the core at `address`, or to the cores of several replicas.

        Args:
            fields: fields of the options by name, such as `stall_timeout_s=30`.
            keys: for tcp addresses: see `protocol.transport.curve.read_client_keys`.
        """
        addresses = [address] if isinstance(address, str) else address
        client = ReplicatedClient(addresses, options, keys=keys, **fields)
        self._thread = LoopThread("engine-client")
        self._client = client
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
        """Wait until the engine serves; TimeoutError after `timeout_s`."""
        return self.run(self._client.wait_ready(timeout_s), timeout_s + 1.0)

    def submit(
        self, prompt_token_ids: list[int], params: SamplingParams, **options: Unpack[RequestOptions]
    ) -> SyncStream:
        """Accept a request and return its stream; see `ReplicatedClient.submit`."""

        async def submit() -> RequestStream:
            return self._client.submit(prompt_token_ids, params, **options)

        return SyncStream(self, self.run(submit(), _CALL_TIMEOUT_S))

    def embed(
        self,
        prompt_token_ids: list[int],
        pooling: Pooling = Pooling(),  # noqa: B008 - immutable
        *,
        timeout_s: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> "array[float]":
        """Return the embedding of a prompt; after `timeout_s`, abort it and raise TimeoutError."""
        work = self._client.embed(prompt_token_ids, pooling, **options)
        return self.run(work, timeout_s)

    pause = _blocking(ReplicatedClient.pause)
    resume = _blocking(ReplicatedClient.resume)
    sleep = _blocking(ReplicatedClient.sleep)
    wake_up = resume
    reset_prefix_cache = _blocking(ReplicatedClient.reset_prefix_cache)

    @property
    def status(self) -> Status | None:
        """The core's last status."""
        return self._client.status

    def close(self) -> None:
        """Disconnect and end the thread; calls of other threads fail. Idempotent.

        TimeoutError: the client's loop is blocked; its thread ends later.
        """
        self._thread.close(self._client.close)

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float | None) -> T:
        """Run a coroutine in the client's loop; cancel it after `timeout_s`."""
        return self._thread.run(work, timeout_s)

    def call(self, function: Callable[[], None]) -> None:
        """Have the loop call a function soon; does nothing if the client is closed."""
        self._thread.call(function)
