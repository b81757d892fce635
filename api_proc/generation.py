"""The life of one request between HTTP and the core: submit, read, cancel, measure."""

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec

from api_proc.bodies import SamplingBody
from api_proc.params import nth_seed
from api_proc.sequence import Delta, OutputSequence
from api_proc.state import ApiState
from protocol.api_core import ErrorCode, RequestError
from protocol.ledger import RequestFailed
from protocol.message import TokenIds
from protocol.sampling import FinishReason, SamplingParams

Step = list[tuple[OutputSequence, Delta]]
"""What came together, in the order in which it came."""


class Generation:
    """All sequences of one HTTP request.

    A context manager: whatever happens inside, nothing of it runs on afterwards.
    """

    def __init__(self, state: ApiState, body: SamplingBody) -> None:
        self.sequences: list[OutputSequence] = []
        self.cancelled = False
        self._state = state
        self._body = body
        self._metrics = state.metrics
        self._arrival = time.monotonic()

    def __enter__(self) -> "Generation":
        self._state.opened()
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
        self._state.closed()

    def submit(self, prompt_token_ids: TokenIds, params: SamplingParams) -> None:
        """Send one prompt to the core, `n` times.

        Raises:
            RequestFailed: the engine refuses it.
        """
        num_sequences = self._body.n or 1
        for i in range(num_sequences):
            nth = msgspec.structs.replace(params, seed=nth_seed(params.seed, i)) if i else params
            self._submit_one(prompt_token_ids, nth)
        self._metrics.params_n.observe(num_sequences)
        self._metrics.params_max_tokens.observe(params.max_tokens)
        self._metrics.prompt_tokens.observe(len(prompt_token_ids))

    def _submit_one(self, prompt_token_ids: TokenIds, params: SamplingParams) -> None:
        body = self._body
        stream = self._state.client.submit(
            prompt_token_ids,
            params,
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            tenant=body.user or "",
        )
        detokenizer = self._state.text.tokenizer.detokenizer(
            prompt_token_ids, skip_special_tokens=body.skip_special_tokens is not False
        )
        sequence = OutputSequence(
            len(self.sequences),
            stream,
            detokenizer,
            num_prompt_tokens=len(prompt_token_ids),
            stop=body.stop_strings,
            include_stop=bool(body.include_stop_str_in_output),
            min_tokens=params.min_tokens,
        )
        self.sequences.append(sequence)

    def cancel(self) -> None:
        """Nobody waits any more: abort everything that runs."""
        self.cancelled = True
        for sequence in self.sequences:
            if sequence.finish_reason is None:
                sequence.finish_reason = FinishReason.ABORT
                sequence.stream.cancel()
                self._metrics.num_finished[FinishReason.ABORT] += 1

    async def steps(self) -> AsyncIterator[Step]:
        """Iterate over what comes, until all sequences have ended or the request is cancelled.

        Raises:
            RequestFailed: the core has given up on a sequence.
        """
        if len(self.sequences) == 1:
            sequence = self.sequences[0]
            async for delta in self._deltas(sequence):
                yield [(sequence, delta)]
            return
        async for step in self._merged():
            yield step

    async def _merged(self) -> AsyncIterator[Step]:
        """One reader per sequence; each waits until what it brought is taken."""
        queue: asyncio.Queue[tuple[OutputSequence, Delta] | Exception | None]
        queue = asyncio.Queue(maxsize=len(self.sequences))

        async def read(sequence: OutputSequence) -> None:
            try:
                async for delta in self._deltas(sequence):
                    await queue.put((sequence, delta))
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        readers = [asyncio.create_task(read(sequence)) for sequence in self.sequences]
        num_reading = len(readers)
        try:
            while num_reading:
                step: Step = []
                items = [await queue.get()]
                while not queue.empty():
                    items.append(queue.get_nowait())
                for item in items:
                    if isinstance(item, Exception):
                        raise item
                    if item is None:
                        num_reading -= 1
                    else:
                        step.append(item)
                if step:
                    yield step
        finally:
            for reader in readers:
                reader.cancel()

    async def _deltas(self, sequence: OutputSequence) -> AsyncIterator[Delta]:
        metrics = self._metrics
        last = first = 0.0
        async for output in sequence.stream:
            delta = sequence.push(output)
            if output.token_ids:
                now = time.monotonic()
                if last:
                    metrics.inter_token_latency.observe(now - last)
                else:
                    first = now
                    metrics.time_to_first_token.observe(now - self._arrival)
                last = now
            if delta.finish_reason is not None:
                self._finish(sequence, first, last)
                yield delta
                return
            if output.token_ids:
                yield delta

    def _finish(self, sequence: OutputSequence, first: float, last: float) -> None:
        assert sequence.finish_reason is not None
        metrics = self._metrics
        metrics.num_finished[sequence.finish_reason] += 1
        metrics.e2e_request_latency.observe(time.monotonic() - self._arrival)
        metrics.generation_tokens.observe(sequence.num_output_tokens)
        if sequence.num_output_tokens > 1:
            metrics.time_per_output_token.observe((last - first) / (sequence.num_output_tokens - 1))
        if sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            message = f"the engine ended the request: {sequence.finish_reason}"
            raise RequestFailed(RequestError(ErrorCode.INTERNAL, message))
