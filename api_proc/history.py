"""All that one sequence has brought, kept so that readers can begin anywhere, again and again."""

import asyncio
from collections.abc import AsyncIterator, Callable

from protocol.api_core import RequestOutput
from protocol.core_worker import PromptLogprobs, TokenLogprobs
from protocol.errors import RequestFailed
from protocol.sampling import FinishReason


class History:
    """A receiver of one request's outputs."""

    def __init__(self, on_output: Callable[["History", RequestOutput | None], None]) -> None:
        """`on_output` is told what is new; None: the request has failed or was cancelled."""
        self.request_id = 0
        """The engine client's number."""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        """One for each token, or none at all."""
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.num_cached_tokens: int | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        self.error: RequestFailed | None = None
        self.is_cut = False
        """It was ended from this side, at a stop string: nobody needs what would follow."""
        self._on_output = on_output
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def is_ended(self) -> bool:
        """Whether nothing more comes."""
        return self.finish_reason is not None or self.error is not None or self.is_cut

    def deliver(self, output: RequestOutput) -> None:
        """Called by the engine client with what is new."""
        if not self.is_ended:
            self.enter(output)
            self._on_output(self, output)
            self.wake()

    def enter(self, output: RequestOutput) -> None:
        """Add an output; what of it is known already is left out."""
        num_known = len(self.token_ids) - output.first_index
        if num_known < 0:
            return  # what lies between was lost, and comes again
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None and not self.token_ids:
            self.prompt_logprobs += output.prompt_logprobs
        self.token_ids += output.token_ids[num_known:]
        if output.logprobs is not None:
            self.logprobs += output.logprobs[num_known:]
        self.finish_reason = output.finish_reason
        self.stop_token_id = output.stop_token_id

    def fail(self, error: RequestFailed) -> None:
        """Called by the engine client: nothing more will come."""
        if not self.is_ended:
            self.error = error
            self._on_output(self, None)
            self.wake()

    def cut(self) -> None:
        """End it here."""
        if not self.is_ended:
            self.is_cut = True
            self._on_output(self, None)
            self.wake()

    def whole(self, first: int = 0) -> RequestOutput:
        """All that there is from one token on, as one output."""
        return RequestOutput(
            self.request_id,
            first,
            self.token_ids[first:],
            self.finish_reason,
            self.stop_token_id,
            None if first else self.num_cached_tokens,
            self.logprobs[first:] if self.logprobs else None,
            (self.prompt_logprobs or None) if not first else None,
        )

    async def changed(self) -> None:
        """Wait for anything new."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def wake(self) -> None:
        """Have all readers look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class HistoryReader:
    """One reader, from the first token on: as `RequestStream`, for something that outlives it."""

    def __init__(self, history: History, cut: Callable[[], None]) -> None:
        """`cut` is called where the reader finds that the sequence ends earlier."""
        self.request_id = history.request_id
        self._history = history
        self._cut = cut
        self._position = 0
        self._finished = False

    @property
    def num_unread(self) -> int:
        """Tokens that have come and were not read yet."""
        return 0 if self._finished else len(self._history.token_ids) - self._position

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        history = self._history
        while not self._finished:
            if len(history.token_ids) > self._position or history.finish_reason is not None:
                output = history.whole(self._position)
                self._position = len(history.token_ids)
                self._finished = history.finish_reason is not None
                return output
            if history.error is not None:
                raise history.error
            if history.is_cut:
                break
            await history.changed()
        raise StopAsyncIteration

    def leave(self) -> None:
        """This reader goes; the sequence goes on."""
        self._finished = True
        self._history.wake()

    def cancel(self) -> None:
        """The sequence ends where this reader is."""
        self._finished = True
        self._cut()
