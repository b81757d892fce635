"""All outputs of one sequence, kept so that any number of readers can begin at any token."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterator

from protocol.api_core import RequestOutput
from protocol.client.errors import RequestFailed
from protocol.core_worker import PromptLogprobs, TokenLogprobs
from protocol.sampling import FinishReason

_PART_TOKENS = 4096
"""Maximal number of tokens in one record of a snapshot."""
_PART_LOGPROBS = 64
"""Maximal number of tokens with logprobs in one record."""


class History:
    """A receiver of one request's outputs."""

    def __init__(
        self,
        on_output: Callable[["History", RequestOutput | None], None] = lambda *_: None,
        on_rebind: Callable[[str, bool], None] = lambda *_: None,
        on_place: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`on_output` gets each new output; None: the request has failed or was stopped.

        `on_rebind` gets the arguments of `rebind`, and `on_place` that of `stored_at`.
        """
        self.request_id = 0
        """The number that the engine client has given to the request."""
        self.token_ids = array("i")
        self.logprobs: list[TokenLogprobs] = []
        """One for each token, or empty."""
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.num_cached_tokens: int | None = None
        self.queue_time_s: float | None = None
        self.num_computed_tokens = 0
        """Tokens of the prompt that are computed, if the request reports them."""
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        self.error: RequestFailed | None = None
        self.is_stopped = False
        """Whether the API ended the sequence at a stop string."""
        self.is_counted = False
        """Whether the metrics include its end."""
        self.resumed_inexactly = False
        """Whether an engine with another fingerprint has continued outputs of the one before."""
        self._on_output = on_output
        self._on_rebind = on_rebind
        self._on_place = on_place
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def is_ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None or self.is_stopped

    def deliver(self, output: RequestOutput) -> None:
        """Receive an output from the engine client."""
        if not self.is_ended:
            self.add(output)
            if output.num_computed_tokens is None:
                self._on_output(self, output)
            else:  # it is of use only while a connection reads it
                self.num_computed_tokens = output.num_computed_tokens
            self.wake()

    def add(self, output: RequestOutput) -> None:
        """Add an output; tokens that are known already are dropped."""
        num_known = len(self.token_ids) - output.first_index
        if num_known < 0:
            return  # the tokens before it were lost, and will be computed again together with it
        if self.num_cached_tokens is None:
            self.num_cached_tokens = output.num_cached_tokens
        if self.queue_time_s is None:
            self.queue_time_s = output.queue_time_s
        for part in output.prompt_logprobs or []:
            self._add_prompt(part)
        if self.finish_reason is not None:
            return  # a snapshot may repeat outputs from before the end
        self.token_ids.extend(output.token_ids[num_known:])
        if output.logprobs is not None:
            self.logprobs += output.logprobs[num_known:]
        self.finish_reason = output.finish_reason
        self.stop_token_id = output.stop_token_id

    def _add_prompt(self, part: PromptLogprobs) -> None:
        """Append a part that continues the known ones; one that comes too early is repeated."""
        known = self.prompt_logprobs
        begins = known[-1].first_position + len(known[-1].entries) if known else 1
        if part.first_position <= begins < part.first_position + len(part.entries):
            known.append(part)

    def count_end(self) -> bool:
        """Mark the end as counted; returns whether it was not before."""
        is_first, self.is_counted = not self.is_counted, True
        return is_first

    def fail(self, error: RequestFailed) -> None:
        """Receive an error from the engine client, after which no output follows."""
        if not self.is_ended:
            self.error = error
            self._on_output(self, None)
            self.wake()

    def rebind(self, fingerprint: str, *, is_exact: bool) -> None:
        """Note that another engine continues the request, on behalf of the engine client."""
        self.resumed_inexactly = self.resumed_inexactly or not is_exact
        self._on_rebind(fingerprint, is_exact)

    def stored_at(self, blocks_at: str) -> None:
        """Note where the KV blocks are read, on behalf of the engine client."""
        self._on_place(blocks_at)

    def stop(self) -> None:
        """End the sequence at its present length."""
        if not self.is_ended:
            self.is_stopped = True
            self._on_output(self, None)
            self.wake()

    def whole(self, first: int = 0) -> RequestOutput:
        """Return all tokens from `first` on as one output."""
        return self._part(first, len(self.token_ids))

    def parts(self) -> Iterator[RequestOutput]:
        """Yield outputs of bounded size for a snapshot; outputs may be added in between."""
        for known in self.prompt_logprobs:  # parts may be appended in between
            for start in range(0, len(known.entries), _PART_LOGPROBS):
                entries = known.entries[start : start + _PART_LOGPROBS]
                piece = PromptLogprobs(known.req_id, known.first_position + start, entries)
                cached = self.num_cached_tokens
                yield RequestOutput(self.request_id, 0, [], None, None, cached, None, [piece])
        first = 0
        while True:
            size = _PART_LOGPROBS if self.logprobs else _PART_TOKENS
            end = min(first + size, len(self.token_ids))
            part = self._part(first, end, with_prompt=False)
            if part.token_ids or part.finish_reason:
                yield part
            first += len(part.token_ids)
            if first >= len(self.token_ids):
                return

    def _part(self, first: int, end: int, *, with_prompt: bool = True) -> RequestOutput:
        is_last = end == len(self.token_ids)
        return RequestOutput(
            self.request_id,
            first,
            self.token_ids[first:end].tolist(),
            self.finish_reason if is_last else None,
            self.stop_token_id if is_last else None,
            None if first else self.num_cached_tokens,
            self.logprobs[first:end] if self.logprobs else None,
            (self.prompt_logprobs or None) if with_prompt and not first else None,
            queue_time_s=None if first else self.queue_time_s,
        )

    async def changed(self) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class HistoryReader:
    """Reads a history from its first token on, with the interface of `RequestStream`."""

    def __init__(self, history: History, stop: Callable[[], None]) -> None:
        """`stop` ends the sequence where the reader finds a stop string."""
        self.request_id = history.request_id
        self._history = history
        self._stop = stop
        self._position = 0
        self._num_before = len(history.token_ids)
        self._num_computed_tokens = 0
        self._is_finished = False

    @property
    def num_unread(self) -> int:
        """Tokens that were received since this reader began, and not read yet."""
        if self._is_finished:
            return 0
        return len(self._history.token_ids) - max(self._position, self._num_before)

    @property
    def resumed_inexactly(self) -> bool:
        """See `History`."""
        return self._history.resumed_inexactly

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        history = self._history
        while not self._is_finished:
            if len(history.token_ids) > self._position or history.finish_reason is not None:
                output = history.whole(self._position)
                self._position = len(history.token_ids)
                self._is_finished = history.finish_reason is not None
                return output
            if history.error is not None:
                raise history.error
            if history.is_stopped:
                break
            if history.num_computed_tokens > self._num_computed_tokens and not history.token_ids:
                self._num_computed_tokens = history.num_computed_tokens
                return self._progress()
            await history.changed()
        raise StopAsyncIteration

    def _progress(self) -> RequestOutput:
        return RequestOutput(
            self.request_id,
            0,
            [],
            num_cached_tokens=self._history.num_cached_tokens,
            num_computed_tokens=self._num_computed_tokens,
        )

    def leave(self) -> None:
        """End this reader; the sequence continues."""
        self._is_finished = True
        self._history.wake()

    def cancel(self) -> None:
        """End the sequence at this reader's position."""
        self._is_finished = True
        self._stop()
