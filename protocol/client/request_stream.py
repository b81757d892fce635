"""The tokens of one request, between the client that receives them and the task that reads them."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from itertools import chain
from typing import Self, TypeVar

import msgspec

from protocol.api_core import ErrorCode, RequestError, RequestOutput
from protocol.client.errors import RequestFailed, failure_of
from protocol.message import unpack_floats

_MERGED_PAST = 16
"""Number of unread outputs above which they are merged: then only tokens (4 bytes each) and
logprobs take more memory."""

T = TypeVar("T")


class RequestStream:
    """The tokens of one request: an asynchronous iterator of `RequestOutput`.

    Unread outputs are merged, so a slow reader gets fewer of them. The last output has a
    `finish_reason`. A refused or failed request raises `RequestFailed`. One task may wait for
    outputs at a time; in a second one, the iteration raises RuntimeError. As a context manager it
    aborts the request when its block is left: a reader that only stops iterating leaves the request
    running.
    """

    def __init__(self, request_id: int, cancel: Callable[[int], None]) -> None:
        """`cancel` is called with the id when the reader cancels.

        The id may be set later, before the stream is read.
        """
        self.request_id = request_id
        self._cancel = cancel
        self._pending: list[RequestOutput] = []
        self._packed = array("i")
        """Tokens of `_pending[0]` that precede its own."""
        self._num_unread = 0
        self._error: RequestFailed | None = None
        self._finished = False
        self._waiter: asyncio.Future[None] | None = None
        self.resumed_inexactly = False
        """True if an engine with another fingerprint has continued earlier outputs."""

    @property
    def num_unread(self) -> int:
        """Tokens that have arrived but are not yet read."""
        return self._num_unread

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    async def __anext__(self) -> RequestOutput:
        """Wait for new tokens; RuntimeError: another task waits for this stream's tokens."""
        if self._waiter is not None:
            raise RuntimeError("another task already waits for the outputs of this request")
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
        if self._packed:
            token_ids = self._packed.tolist() + output.token_ids
            output, self._packed = msgspec.structs.replace(output, token_ids=token_ids), array("i")
        self._num_unread = 0
        self._finished = self._finished or output.finish_reason is not None
        return output

    def cancel(self) -> None:
        """Abort the request and end the iteration. Idempotent."""
        self._finished = True
        self._pending, self._packed = [], array("i")
        self._num_unread = 0
        self._cancel(self.request_id)
        self._wake()

    def deliver(self, output: RequestOutput) -> None:
        """Called by the client with new tokens."""
        if not self._finished:
            self._pending.append(output)
            self._num_unread += len(output.token_ids)
            if len(self._pending) >= _MERGED_PAST:
                whole = merge(self._pending)
                self._packed.extend(whole.token_ids)
                self._pending = [msgspec.structs.replace(whole, token_ids=[])]
            self._wake()

    def fail(self, error: RequestFailed) -> None:
        """Called by the client when the request has failed."""
        self._error = error
        self._wake()

    def rebind(self, fingerprint: str, *, is_exact: bool) -> None:
        """Called by the client when another engine continues the request; see `Receiver`."""
        self.resumed_inexactly = self.resumed_inexactly or not is_exact

    def stored_at(self, blocks_at: str) -> None:
        """Called by the client when the request was moved; only a journal uses this."""

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


async def vector_of(stream: RequestStream) -> "array[float]":
    """Return the embedding of a request with `pooling`; a cancelled task aborts the request."""
    with stream:
        async for output in stream:
            if output.embedding is not None:
                return unpack_floats(output.embedding)
    raise failure_of(RequestError(ErrorCode.INTERNAL, "the request ended without its vector"))


def merge(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """Join consecutive outputs of one request."""
    first, last = outputs[0], outputs[-1]
    if first is last:
        return first

    def join(columns: Iterable[list[T] | None]) -> list[T] | None:
        return list(chain.from_iterable(column or () for column in columns)) or None

    cached = (output.num_cached_tokens for output in outputs)
    queued = (output.queue_time_s for output in outputs)
    return RequestOutput(
        first.request_id,
        first.first_index,
        list(chain.from_iterable(output.token_ids for output in outputs)),
        last.finish_reason,
        last.stop_token_id,
        next((count for count in cached if count is not None), None),
        join(output.logprobs for output in outputs),
        join(output.prompt_logprobs for output in outputs),
        last.embedding,
        last.num_computed_tokens,
        next((seconds for seconds in queued if seconds is not None), None),
    )
