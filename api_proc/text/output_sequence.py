"""An output sequence of a request: decodes token ids, and ends at a stop string."""

from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple, Protocol

from api_proc.chat.events import Event, merged
from api_proc.chat.parser import OutputParser
from api_proc.chat.reasoning_counter import ReasoningCounter
from api_proc.text.detokenizer import Detokenizer
from api_proc.text.stop import StopMatcher
from protocol.api_core import RequestOutput
from protocol.core_worker import TokenLogprobs
from protocol.sampling import FinishReason

REPETITION_DETECTED = "repetition_detected"
"""The stop_reason of an output that repeats a pattern."""


class Prompt(NamedTuple):
    """A prompt of a request: its ids, and its text if it was sent as text."""

    token_ids: list[int]
    text: str | None


class TokenStream(Protocol):
    """The source of a sequence's tokens."""

    @property
    def num_unread(self) -> int:
        """Tokens that have arrived but are not yet read."""

    @property
    def resumed_inexactly(self) -> bool:
        """True if an engine with another fingerprint has continued earlier outputs."""

    def __aiter__(self) -> AsyncIterator[RequestOutput]: ...

    async def __anext__(self) -> RequestOutput: ...

    def cancel(self) -> None:
        """Stop generating."""


class Delta(NamedTuple):
    """The text and tokens that one output of the core adds to a response."""

    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    text_offsets: Sequence[int] = ()
    """For each token, the number of output characters before it."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the sequence, or `REPETITION_DETECTED`."""
    events: list[Event] | None = None
    """The parsed parts of the text; None without a parser: everything is content."""
    num_computed_tokens: int | None = None
    """Number of computed prompt tokens, in a delta that has nothing else."""
    token_events: list[list[Event]] | None = None
    """With a parser and log-probabilities: the parsed parts that each token completes.

    A further item is what the end of the text completes.
    """


class StopStrings(NamedTuple):
    """The strings that end a sequence early."""

    strings: Sequence[str]
    include_in_output: bool
    min_tokens: int
    """Number of output tokens before which no stop string ends the sequence. One that begins in
    these tokens may end it after them."""


class OutputSequence:
    """The state of a sequence while it is generated."""

    def __init__(
        self,
        index: int,
        stream: TokenStream,
        detokenizer: Detokenizer,
        *,
        num_prompt_tokens: int,
        stop: StopStrings,
        parser: OutputParser | None = None,
        reasoning: ReasoningCounter | None = None,
        accepted_at: float | None = None,
    ) -> None:
        """`reasoning` counts the tokens of an output that has a parser.

        `accepted_at` is the time of its submission on the monotonic clock; None: it was submitted
        before its outputs were read here.
        """
        self.accepted_at = accepted_at
        self.parser = parser
        self.reasoning = reasoning
        self.index = index
        self.stream = stream
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = 0
        self.num_cached_tokens = 0
        self.queue_time_s: float | None = None
        """Seconds until the engine began with it; None: not known."""
        self.finish_reason: str | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] = [None]  # the first token has none
        """By position; None for the first token."""
        self._detokenizer = detokenizer
        self._stop_strings = stop
        self._matcher: StopMatcher | None = None
        if stop.strings:
            self._matcher = StopMatcher(stop.strings, include_in_output=stop.include_in_output)
        self._num_chars = 0

    def push(self, output: RequestOutput) -> Delta:
        """Process the next output of the core; a stop string ends the sequence early."""
        self._add_prompt_info(output)
        finish_reason = None if output.finish_reason is None else str(output.finish_reason)
        pieces: list[str] = []
        if self._matcher is None and output.logprobs is None:
            delta = self._push_all(output, finish_reason)
        else:
            delta = self._push_each(output, finish_reason, pieces)
        if self.parser is not None:
            is_last = delta.finish_reason is not None
            if pieces and delta.logprobs is not None:
                parts = [self.parser.push(piece, is_last=False) for piece in pieces[:-1]]
                parts.append(self.parser.push(pieces[-1], is_last=is_last))
                events = merged([event for part in parts for event in part])
                delta = delta._replace(events=events, token_events=parts)
            else:
                delta = delta._replace(events=self.parser.push(delta.text, is_last=is_last))
            if self.reasoning is not None:
                self.reasoning.push(delta.token_ids)
        self.finish_reason = delta.finish_reason
        return delta

    def _add_prompt_info(self, output: RequestOutput) -> None:
        if output.num_cached_tokens is not None and self.num_output_tokens == 0:
            self.num_cached_tokens = output.num_cached_tokens
        if self.queue_time_s is None:
            self.queue_time_s = output.queue_time_s
        for part in output.prompt_logprobs or []:
            known = self.prompt_logprobs
            assert part.first_position <= len(known)
            known.extend(part.entries[len(known) - part.first_position :])

    def _push_all(self, output: RequestOutput, finish_reason: str | None) -> Delta:
        """The common case: all tokens are decoded in one call."""
        token_ids = output.token_ids
        self.num_output_tokens += len(token_ids)
        if finish_reason is None:
            return Delta(self._detokenizer.push(token_ids), token_ids)
        text = self._detokenizer.push(token_ids[: self._num_shown(output)])
        text += self._detokenizer.flush()
        return Delta(text, token_ids, None, (), finish_reason, _stop_reason(output))

    def _push_each(
        self, output: RequestOutput, finish_reason: str | None, pieces: list[str]
    ) -> Delta:
        """Process tokens one by one, and add the text that each one completes to `pieces`."""
        offsets: list[int] = []
        num_shown = self._num_shown(output)
        for position, token_id in enumerate(output.token_ids):
            offsets.append(self._num_chars)
            self.num_output_tokens += 1
            is_last = finish_reason is not None and position == len(output.token_ids) - 1
            piece = self._detokenizer.push([token_id]) if position < num_shown else ""
            if is_last:
                piece += self._detokenizer.flush()
            pieces.append(self._filter(piece))
            if self._matcher is not None and self._matcher.matched is not None:
                text = "".join(pieces)
                return self._stop(output, position + 1, text, offsets, self._matcher.matched)
        if finish_reason is not None and self._matcher is not None:
            pieces.append(self._matcher.flush())
        text, logprobs = "".join(pieces), output.logprobs
        return Delta(text, output.token_ids, logprobs, offsets, finish_reason, _stop_reason(output))

    def _filter(self, piece: str) -> str:
        """Return the part of `piece` that cannot become part of a stop string."""
        self._num_chars += len(piece)
        if self._matcher is None or not piece:
            return piece
        may_match = self.num_output_tokens > self._stop_strings.min_tokens
        return self._matcher.push(piece, may_match=may_match)

    def _stop(
        self, output: RequestOutput, num_tokens: int, text: str, offsets: list[int], matched: str
    ) -> Delta:
        if num_tokens < len(output.token_ids) or output.finish_reason is None:
            self.stream.cancel()
        logprobs = None if output.logprobs is None else output.logprobs[:num_tokens]
        token_ids = output.token_ids[:num_tokens]
        return Delta(text, token_ids, logprobs, offsets, str(FinishReason.STOP), matched)

    def _num_shown(self, output: RequestOutput) -> int:
        """Return the number of tokens to decode: without a stop token unless it was requested."""
        num_tokens = len(output.token_ids)
        if output.finish_reason is FinishReason.STOP and not self._stop_strings.include_in_output:
            return num_tokens - 1
        return num_tokens


def _stop_reason(output: RequestOutput) -> int | str | None:
    if output.finish_reason is FinishReason.REPETITION:
        return REPETITION_DETECTED
    return output.stop_token_id


def join(deltas: list[Delta]) -> Delta:
    """Merge all deltas of one sequence."""
    last = deltas[-1]
    logprobs = events = token_events = None
    if last.events is not None:
        events = [event for delta in deltas for event in delta.events or []]
    if any(delta.logprobs is not None for delta in deltas):
        logprobs = [entry for delta in deltas for entry in delta.logprobs or []]
    if logprobs is not None and events is not None:
        token_events = [part for delta in deltas for part in _token_events(delta)]
    return Delta(
        "".join([delta.text for delta in deltas]),
        [token_id for delta in deltas for token_id in delta.token_ids],
        logprobs,
        [offset for delta in deltas for offset in delta.text_offsets],
        last.finish_reason,
        last.stop_reason,
        events,
        token_events=token_events,
    )


def _token_events(delta: Delta) -> list[list[Event]]:
    """Return the parsed parts by token; an output without tokens may end the text."""
    if delta.token_events is None:
        return [delta.events] if delta.events else []
    return delta.token_events
