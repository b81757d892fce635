"""Beam search, composed of ordinary requests: each step requests one token after each beam.

The search keeps only token ids and sums of log-probabilities. Each request survives the death of
the core and of a worker like any other, and so does the search.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import NamedTuple

from api_proc.text.output_sequence import TokenStream
from protocol.api_core import ErrorCode, RequestError, RequestOutput
from protocol.client.errors import RequestFailed, failure_of
from protocol.core_worker import TokenLogprobs
from protocol.sampling import MAX_LOGPROBS, FinishReason, SamplingParams

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""Each beam is continued with twice as many candidates."""
_SLICE_S = 0.002

Submit = Callable[[list[int], SamplingParams], TokenStream]
"""Sends a request to the engine, given the tokens of a beam that follow the prompt."""


class BeamSearchOptions(NamedTuple):
    beam_width: int
    max_tokens: int
    eos_token_ids: frozenset[int]
    """Tokens that end a beam; empty: EOS is treated like any other token."""
    stop_token_ids: frozenset[int] = frozenset()
    """The request's own stop tokens, which are reported as the stop reason."""
    length_penalty: float = 1.0
    """Exponent of the length by which the sum of log-probabilities is divided."""
    early_stopping: bool = False
    """Stop once `beam_width` beams have ended; otherwise continue until none can improve."""
    num_logprobs: int = 0
    """Number of candidates to return at each position."""
    suppressed_token_ids: frozenset[int] = frozenset()
    """Tokens that no beam contains; `max_beam_width` depends on their number."""


def max_beam_width(num_suppressed: int) -> int:
    """Return how many beams can be searched if a step's candidates may include these tokens.

    Enough other candidates remain even if all suppressed tokens are among the most likely ones.
    """
    return (MAX_LOGPROBS - num_suppressed) // 2


class Beam(NamedTuple):
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    cumulative_logprob: float
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None

    def score(self, length_penalty: float, num_tokens: int | None = None) -> float:
        """Return the score for comparing beams; a token that ends the beam adds no length."""
        if num_tokens is None:
            num_tokens = len(self.token_ids) - (self.finish_reason is FinishReason.STOP)
        return float(self.cumulative_logprob / max(1, num_tokens) ** length_penalty)


class BeamSearchResult(NamedTuple):
    beams: list[Beam]
    """Best first."""
    num_cached_tokens: int | None
    """Cached tokens of the prompt at the first step."""


async def beam_search(submit: Submit, options: BeamSearchOptions) -> BeamSearchResult:
    """Return the best beams; RequestFailed: one of the requests has failed."""
    width, penalty = options.beam_width, options.length_penalty
    num_candidates = 2 * width + len(options.suppressed_token_ids)
    params = SamplingParams(
        max_tokens=1, temperature=0.0, logprobs=max(num_candidates, options.num_logprobs)
    )
    beams = [Beam([], [], 0.0)]
    ended: list[Beam] = []
    num_cached_tokens = None
    for _ in range(options.max_tokens):
        outputs = await _step(submit, beams, params)
        if beams[0].token_ids == []:
            num_cached_tokens = outputs[0].num_cached_tokens
        candidates = [
            _Candidate(beam, entry, place)
            for beam, output in zip(beams, outputs, strict=True)
            for entry in output.logprobs or ()
            for place in _places(entry, options)
        ]
        candidates.sort(key=lambda candidate: -candidate.cumulative_logprob)
        ends = options.eos_token_ids | options.stop_token_ids
        ended += [_extended(c, options) for c in candidates if c.token_id in ends][:width]
        ended.sort(key=lambda beam: -beam.score(penalty))
        del ended[width:]
        beams = [_extended(c, options) for c in candidates if c.token_id not in ends][:width]
        if not beams or _is_over(beams, ended, options):
            beams = []
            break
    ended += [beam._replace(finish_reason=FinishReason.LENGTH) for beam in beams]
    ended.sort(key=lambda beam: -beam.score(penalty))
    return BeamSearchResult(ended[:width], num_cached_tokens)


class _Candidate(NamedTuple):
    """A beam with one of the tokens that may follow it."""

    beam: Beam
    entry: TokenLogprobs
    place: int

    @property
    def token_id(self) -> int:
        return self.entry.top_ids[self.place]

    @property
    def cumulative_logprob(self) -> float:
        return self.beam.cumulative_logprob + self.entry.top_logprobs[self.place]


def _places(entry: TokenLogprobs, options: BeamSearchOptions) -> list[int]:
    """Return the places of the tokens that may follow a beam, the most likely first."""
    suppressed = options.suppressed_token_ids
    places = [i for i, token_id in enumerate(entry.top_ids) if token_id not in suppressed]
    return places[: 2 * options.beam_width]


async def _step(submit: Submit, beams: list[Beam], params: SamplingParams) -> list[RequestOutput]:
    """Continue all beams by one token; long prompts are submitted in several loop turns."""
    streams: list[TokenStream] = []
    outputs = []
    try:
        began = time.perf_counter()
        for beam in beams:
            if time.perf_counter() - began > _SLICE_S:
                await asyncio.sleep(0)
                began = time.perf_counter()
            streams.append(submit(beam.token_ids, params))
        for stream in streams:
            outputs.append(await _only_output(stream))
    finally:
        for stream in streams:
            stream.cancel()
    return outputs


async def _only_output(stream: TokenStream) -> RequestOutput:
    async for output in stream:
        if output.token_ids:
            return output
    raise failure_of(RequestError(ErrorCode.INTERNAL, "a step of the beam search has no token"))


def _extended(candidate: _Candidate, options: BeamSearchOptions) -> Beam:
    beam, entry, place = candidate
    token_id, logprob = entry.top_ids[place], entry.top_logprobs[place]
    num_top = options.num_logprobs
    tops = entry.top_ids[:num_top], entry.top_logprobs[:num_top]
    is_own = token_id in options.stop_token_ids
    has_ended = is_own or token_id in options.eos_token_ids
    return Beam(
        [*beam.token_ids, token_id],
        [*beam.logprobs, TokenLogprobs(token_id, logprob, place + 1, *tops)],
        candidate.cumulative_logprob,
        FinishReason.STOP if has_ended else None,
        token_id if is_own else None,
    )


def _is_over(beams: list[Beam], ended: list[Beam], options: BeamSearchOptions) -> bool:
    """Return whether no beam can displace one of those that have ended.

    Continuing a beam cannot increase its likelihood, so only its length can raise its score.
    """
    if len(ended) < options.beam_width:
        return False
    if options.early_stopping:
        return True
    penalty = options.length_penalty
    num_tokens = options.max_tokens if penalty > 0 else len(beams[0].token_ids)
    worst = ended[-1].score(penalty)
    return all(beam.score(penalty, num_tokens) <= worst for beam in beams)


class BeamSearch:
    """A search whose beams are read as streams; it starts at the first read."""

    def __init__(self, submit: Submit, options: BeamSearchOptions) -> None:
        self._search = partial(beam_search, submit, options)
        self._task: asyncio.Task[BeamSearchResult] | None = None
        self._error: RequestFailed | None = None
        self._num_streams = options.beam_width

    def streams(self) -> "list[BeamStream]":
        """Return a reader for each beam, the best first."""
        return [BeamStream(self, rank) for rank in range(self._num_streams)]

    async def result(self) -> BeamSearchResult | None:
        """Wait for the end; None: the search was cancelled."""
        if self._error is not None:
            raise self._error
        if self._task is None:
            self._task = asyncio.create_task(self._search())
        try:
            return await asyncio.shield(self._task)
        except asyncio.CancelledError:
            if self._error is not None:
                raise self._error from None
            if not self._task.cancelled():  # the reader was cancelled
                raise
            return None

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def fail(self, error: RequestFailed) -> None:
        """End the search with an error for all readers of its beams."""
        self._error = self._error or error
        self.cancel()


class BeamStream:
    """The beam of one rank: a `TokenStream` that yields a single output at the end."""

    num_unread = 0
    resumed_inexactly = False  # each request has a single token

    def __init__(self, search: BeamSearch, rank: int) -> None:
        self._search = search
        self._rank = rank
        self._is_read = False

    def __aiter__(self) -> AsyncIterator[RequestOutput]:
        return self

    async def __anext__(self) -> RequestOutput:
        result = None if self._is_read else await self._search.result()
        if result is None:
            raise StopAsyncIteration
        self._is_read = True
        beam = result.beams[self._rank]
        return RequestOutput(
            0,
            0,
            beam.token_ids,
            beam.finish_reason,
            beam.stop_token_id,
            result.num_cached_tokens,
            beam.logprobs,
        )

    def cancel(self) -> None:
        self._search.cancel()

    def fail(self, error: RequestFailed) -> None:
        self._search.fail(error)
