"""All that one sequence has brought, kept so that readers can begin anywhere, again and again."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterator

from protocol.api_core import RequestOutput
from protocol.core_worker import PromptLogprobs, TokenLogprobs
from protocol.errors import RequestFailed
from protocol.sampling import FinishReason

_PART_TOKENS = 4096
_PART_LOGPROBS = 64
"""Tokens of one record of a snapshot, without logprobs and with them."""


class History:
    """A receiver of one request's outputs."""

    def __init__(self, on_output: Callable[["History", RequestOutput | None], None]) -> None:
        """`on_output` is told what is new; None: the request has failed or was cancelled."""
        self.request_id = 0
        """The engine client's number."""
        self.token_ids = array("i")
        self.logprobs: list[TokenLogprobs] = []
        """One for each token, or none at all."""
        self.prompt_logprobs: list[PromptLogprobs] = []
        self.num_cached_tokens: int | None = None
        self.finish_reason: FinishReason | None = None
        self.stop_token_id: int | None = None
        self.error: RequestFailed | None = None
        self.is_cut = False
        """It was ended from this side, at a stop string: nobody needs what would follow."""
        self.is_counted = False
        """Its end is among what the metrics count."""
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
        for part in output.prompt_logprobs or []:
            self._enter_prompt(part)
        if self.finish_reason is not None:
            return  # what a snapshot tells of the time before
        self.token_ids.extend(output.token_ids[num_known:])
        if output.logprobs is not None:
            self.logprobs += output.logprobs[num_known:]
        self.finish_reason = output.finish_reason
        self.stop_token_id = output.stop_token_id

    def _enter_prompt(self, part: PromptLogprobs) -> None:
        """Add it where it goes on; what comes too early comes again, in a snapshot."""
        known = self.prompt_logprobs
        begins = known[-1].first_position + len(known[-1].entries) if known else 1
        if part.first_position <= begins < part.first_position + len(part.entries):
            known.append(part)

    def count_end(self) -> bool:
        """Whether its end was not counted before; from now on it is."""
        is_first, self.is_counted = not self.is_counted, True
        return is_first

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
        return self._part(first, len(self.token_ids))

    def parts(self) -> Iterator[RequestOutput]:
        """All that there is, in pieces of bounded size; what comes meanwhile may be among it."""
        for prompt_part in self._prompt_parts():
            yield RequestOutput(
                self.request_id,
                0,
                [],
                num_cached_tokens=self.num_cached_tokens,
                prompt_logprobs=[prompt_part],
            )
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

    def _prompt_parts(self) -> Iterator[PromptLogprobs]:
        for part in self.prompt_logprobs:  # what is added meanwhile is among it
            for start in range(0, len(part.entries), _PART_LOGPROBS):
                entries = part.entries[start : start + _PART_LOGPROBS]
                yield PromptLogprobs(part.req_id, part.first_position + start, entries)

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
        self._num_before = len(history.token_ids)
        self._finished = False

    @property
    def num_unread(self) -> int:
        """Tokens that have come since this reader began, and were not read yet."""
        if self._finished:
            return 0
        return len(self._history.token_ids) - max(self._position, self._num_before)

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
