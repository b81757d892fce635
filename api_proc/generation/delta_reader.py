"""Reads the sequences of a generation: what is new in each, in the order of arrival."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from api_proc.bodies import SamplingBody
from api_proc.generation.pieces import chained, pieces
from api_proc.generation.steps import Step, merged
from api_proc.generation.token_times import TokenTimes
from api_proc.metrics.process_metrics import Metrics
from api_proc.resumption.event_ids import StreamPosition, beyond_the_end
from api_proc.resumption.history import History
from api_proc.text.output_sequence import Delta, OutputSequence
from protocol.api_core import ErrorCode, RequestError, RequestOutput
from protocol.client.errors import RequestFailed
from protocol.sampling import FinishReason

OnSkipped = Callable[[OutputSequence, Delta], None]


class DeltaReader:
    """The deltas of all sequences of one HTTP request, over one connection."""

    def __init__(
        self, body: SamplingBody, metrics: Metrics, *, request_id: str, arrival: float
    ) -> None:
        """Read the sequences of a request that arrived at `arrival` on the monotonic clock."""
        self._body = body
        self._metrics = metrics
        self._request_id = request_id
        self._arrival = arrival
        self._num_each = body.num_sequences
        has_prompts = body.num_prompt_logprobs is not None  # a beam search has none
        self._waits_for_prompts = bool(body.stream and has_prompts and self._num_each > 1)
        """Whether a prompt's other sequences begin after the first one, which alone has the log
        probabilities of the prompt."""
        self._prompts_read: list[asyncio.Event] = []
        """For each prompt, set when its log probabilities have arrived."""
        self._is_cancelled = False
        self._sequences: Sequence[OutputSequence] = ()
        self._histories: Sequence[History] = ()
        self._position: StreamPosition | None = None
        self._on_skipped: OnSkipped | None = None
        self.time_to_first_token_s: float | None = None
        """Seconds from the arrival to the first token of any sequence; None before it."""

    async def steps(
        self,
        sequences: Sequence[OutputSequence],
        histories: Sequence[History] = (),
        *,
        position: StreamPosition | None = None,
        on_skipped: OnSkipped | None = None,
    ) -> AsyncIterator[Step]:
        """Iterate over deltas until all sequences have ended or the reader is cancelled.

        Args:
            histories: those of a session, which count the end of a sequence once for all readers.
            position: the end of an earlier answer, which this one continues.
            on_skipped: receives the deltas that the earlier answer contained.
        """
        self._sequences, self._histories = sequences, histories
        self._position, self._on_skipped = position, on_skipped
        if self._waits_for_prompts:
            self._prompts_read = [asyncio.Event() for _ in sequences[:: self._num_each]]
        if len(sequences) == 1:
            [sequence] = sequences
            async for delta in self._deltas(sequence):
                yield [(sequence, delta)]
            return
        async for step in merged(sequences, self._deltas):
            yield step

    def cancel(self) -> None:
        """End all waits for prompts; the owner of the sequences ends their streams."""
        self._is_cancelled = True
        self._on_skipped = None  # its reference would delay freeing memory
        for was_read in self._prompts_read:
            was_read.set()

    def _deltas(self, sequence: OutputSequence) -> AsyncIterator[Delta]:
        if self._waits_for_prompts or self._body.return_progress:
            return self._with_prompt(sequence)
        return self._read(sequence, sequence.stream)

    async def _with_prompt(self, sequence: OutputSequence) -> AsyncIterator[Delta]:
        """Iterate over the deltas, preceded by those that show the progress of the prompt."""
        num_computed = 0
        async for output in sequence.stream:
            if not output.token_ids and output.finish_reason is None:
                sequence.push(output)
                if (output.num_computed_tokens or 0) > num_computed:
                    num_computed = output.num_computed_tokens or 0
                    yield Delta("", [], num_computed_tokens=num_computed)
                continue
            if self._body.return_progress and sequence.index % self._num_each == 0:
                yield Delta("", [], num_computed_tokens=sequence.num_prompt_tokens)
            if self._waits_for_prompts:
                await self._wait_for_prompt(sequence)
                if self._is_cancelled:
                    return
            async for delta in self._read(sequence, chained(output, sequence.stream)):
                yield delta

    async def _wait_for_prompt(self, sequence: OutputSequence) -> None:
        """Wait until the prompt's first sequence, which has its log probabilities, has begun."""
        prompt, place = divmod(sequence.index, self._num_each)
        was_read = self._prompts_read[prompt]
        if place == 0:
            was_read.set()
        elif not self._is_cancelled:
            await was_read.wait()

    async def _read(
        self, sequence: OutputSequence, outputs: AsyncIterator[RequestOutput]
    ) -> AsyncIterator[Delta]:
        times = TokenTimes(self._metrics, self._arrival)
        skip = (self._position.num_sent[sequence.index] or 0) if self._position else 0
        async for output in outputs:
            if output.token_ids:
                times.arrived()
                if self.time_to_first_token_s is None:
                    self.time_to_first_token_s = times.to_first_s
            for piece in pieces(output, skip - sequence.num_output_tokens):
                delta = sequence.push(piece)
                if skip and sequence.num_output_tokens <= skip:  # an earlier answer contained it
                    if self._on_skipped is not None:
                        self._on_skipped(sequence, delta)
                    if delta.finish_reason is not None:
                        if sequence.num_output_tokens < skip:  # the client has different tokens
                            num_tokens = sequence.num_output_tokens
                            raise beyond_the_end(self._request_id, skip, num_tokens)
                        return
                    await asyncio.sleep(0)  # let other requests run while many tokens are skipped
                elif delta.finish_reason is not None:
                    self._finish(sequence, times)
                    yield delta
                    return
                elif piece.token_ids:
                    yield delta

    def _finish(self, sequence: OutputSequence, times: TokenTimes) -> None:
        assert sequence.finish_reason is not None
        if not self._histories or self._histories[sequence.index].count_end():
            times.ended(sequence)
            self._count_longest(sequence)
        if sequence.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            message = f"the engine ended the request: {sequence.finish_reason}"
            raise RequestFailed(RequestError(ErrorCode.INTERNAL, message))

    def _count_longest(self, ended: OutputSequence) -> None:
        """Record the longest of a prompt's sequences once all have ended."""
        first = ended.index - ended.index % self._num_each
        group = self._sequences[first : first + self._num_each]
        if all(sequence.finish_reason is not None for sequence in group):
            longest = max(sequence.num_output_tokens for sequence in group)
            self._metrics.max_num_generation_tokens.observe(longest)
