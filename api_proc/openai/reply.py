"""Renders the response to a generation request: complete bodies and server-sent events."""

import time
from collections.abc import Callable
from copy import copy
from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from api_proc.bodies import SamplingBody
from api_proc.errors import ApiError
from api_proc.generation.answer import MakeAnswer
from api_proc.generation.generation import Generation
from api_proc.http.connection import Connection, encode
from api_proc.openai.chat_message import plain_delta
from api_proc.openai.encoded_list import EncodedLists
from api_proc.openai.objects import (
    DONE_FRAME,
    CompletionTokensDetails,
    PromptProgress,
    PromptTokensDetails,
    Usage,
)
from api_proc.resumption.event_ids import EventIds, StreamPosition
from api_proc.state import ApiState
from api_proc.text.output_sequence import Delta, OutputSequence, Prompt, join
from api_proc.text.tokenizer import TextTokenizer

_NO_CHOICES = b'"choices":[]'
"""How the list begins; within a text, a quotation mark would have a backslash."""

EndedSequence = tuple[OutputSequence, Delta]
"""A sequence and all of its deltas, joined."""


class Format(Protocol):
    """The format of one route's responses; chats and completions differ in their choices."""

    @property
    def head(self) -> msgspec.Struct:
        """Return a chunk with an empty list of choices."""

    @property
    def lists(self) -> EncodedLists:
        """Return the long arrays of the choices and responses that were made last."""

    @property
    def plain_choice(self) -> tuple[bytes, bytes]:
        """Return the JSON before and after the text in the choice of a text-only chunk."""

    def opening(self, sequence: OutputSequence) -> dict[str, Any] | None:
        """Return the fields of the chunk before the first text, if there is one."""

    def choice(self, sequence: OutputSequence, delta: Delta, *, is_first: bool) -> msgspec.Struct:
        """Return a chunk's choice."""

    def whole(self, first: OutputSequence, usage: Usage) -> msgspec.Struct:
        """Return the complete response with an empty list of choices; `first` is a sequence."""

    def whole_choice(self, sequence: OutputSequence, delta: Delta) -> msgspec.Struct:
        """Return a choice of the complete response, given all deltas, joined."""


def chunk_answers(
    make_format: Callable[[TextTokenizer, Any, list[Prompt], Any], Format],
    id_prefix: str,
    make_head: Callable[..., Any],
) -> MakeAnswer:
    """Return a function that makes replies; `make_head` creates a chunk without choices."""

    def make_reply(
        state: ApiState, connection: Connection, body: SamplingBody, generation: Generation
    ) -> Reply:
        head = make_head(
            id=id_prefix + connection.request_id,
            created=generation.created,
            model=state.shown_model(body.model),
            choices=[],
        )
        form = make_format(state.text.tokenizer, body, generation.prompts, head)
        return Reply(form, body, generation)

    return make_reply


class Reply:
    """The response of a completion or a chat: choices, streamed as chunks."""

    def __init__(self, form: Format, body: SamplingBody, generation: Generation) -> None:
        self._form = form
        self._generation = generation
        self._num_each = body.num_sequences
        self._echoes_prompt = body.echoes_prompt
        self._is_echo_alone = body.is_echo_alone
        self._num_returned = body.n or 1
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._with_running_usage = bool(options and options.continuous_usage_stats)
        self._is_plain = not (self._with_running_usage or body.return_token_ids)
        nowhere = StreamPosition([None] * len(generation.sequences))
        num_sent, self._is_usage_sent = generation.position or nowhere
        self._ids = EventIds(
            generation.request_id, list(num_sent), is_resumable=generation.is_resumable
        )
        self._begun = {i for i, count in enumerate(num_sent) if count is not None}
        """Sequences that have begun, in this response or an earlier one."""
        self._deltas: dict[int, list[Delta]] = {}
        head = encode(form.head)
        assert head.endswith(b"]}")
        before, after = form.plain_choice
        usage = b',"usage":null' if self._with_usage else b""
        self._plain_start = b"data: " + head[:-2] + b'{"index":'
        self._plain_text = b"," + before
        self._plain_end = after + b"}]" + usage + b"}\n\n"

    def frames(self, sequence: OutputSequence, delta: Delta) -> list[bytes]:
        events = self._events(sequence, delta)
        return self._ids.tag(events, sequence.index, len(delta.token_ids))

    def skip(self, sequence: OutputSequence, delta: Delta) -> None:
        """Do nothing: later chunks do not depend on it."""

    def _events(self, sequence: OutputSequence, delta: Delta) -> list[bytes]:
        """Return a delta's events; text-only ones are assembled from prepared bytes."""
        form = self._form
        events = []
        is_first = sequence.index not in self._begun
        if is_first:
            if delta.num_computed_tokens is not None:
                return [self._progress(sequence, delta.num_computed_tokens)]
            self._begun.add(sequence.index)
            if opening := form.opening(sequence):
                events.append(self._frame(**opening))
        is_plain = self._is_plain and delta.finish_reason is None and delta.logprobs is None
        is_plain = is_plain and not (is_first and self._echoes_prompt)
        if is_plain and delta.events is None:
            if delta.text:
                text = encode(delta.text)
                index, end = sequence.index, self._plain_end
                pieces = (self._plain_start, index, self._plain_text, text, end)
                events.append(b"%b%d%b%b%b" % pieces)
            return events
        piece = plain_delta(delta.events) if is_plain and delta.events is not None else None
        if piece is None:
            events.append(self._frame(choices=[form.choice(sequence, delta, is_first=is_first)]))
        elif piece:
            start, end = self._plain_start, self._plain_end
            events.append(b"%b%d,%b%b" % (start, sequence.index, piece, end))
        return events

    def last_frames(self) -> list[bytes]:
        """Return an event with the usage and no choices, if requested, and the end."""
        if not self._with_usage or self._is_usage_sent:
            return [DONE_FRAME]
        return [self._ids.tag_usage(self._frame(with_usage=True, choices=[])), DONE_FRAME]

    def failure(self, error: ApiError) -> list[bytes]:
        return [b"data: %b\n\n" % error.body(), DONE_FRAME]

    async def keep(self) -> None:
        """Do nothing: completions and chats are not stored."""

    def collect(self, sequence: OutputSequence, delta: Delta) -> None:
        self._deltas.setdefault(sequence.index, []).append(delta)

    def _progress(self, sequence: OutputSequence, num_computed_tokens: int) -> bytes:
        """Return an event that shows how much of the prompt is computed."""
        progress = PromptProgress(
            total=sequence.num_prompt_tokens,
            cache=sequence.num_cached_tokens,
            processed=num_computed_tokens,
            time_ms=round(1000 * (time.monotonic() - self._generation.arrival)),
        )
        empty = self._form.choice(sequence, Delta("", []), is_first=False)
        return self._frame(choices=[empty], prompt_progress=progress)

    def body(self) -> list[bytes]:
        """Return the complete body in pieces: one for each choice, and what is around them.

        The deltas of a sequence are dropped as soon as it is rendered.
        """
        sequences, lists = self._generation.sequences, self._form.lists
        pieces = lists.encoded(self._form.whole(sequences[0], self._usage()))
        before, after = _around_choices(pieces)
        answers = [(sequence, join(self._deltas.pop(sequence.index))) for sequence in sequences]
        if self._num_each > self._num_returned:
            answers = self._best(answers)
        pieces = [*before, _NO_CHOICES[:-1]]
        answers.reverse()
        while answers:
            pieces += lists.encoded(self._form.whole_choice(*answers.pop()))
            pieces.append(b"," if answers else b"]")
        return pieces + after

    def _best(self, answers: list[EndedSequence]) -> list[EndedSequence]:
        """Return the most likely answers to each prompt, renumbered."""
        best: list[EndedSequence] = []
        for first in range(0, len(answers), self._num_each):
            ranked = sorted(answers[first : first + self._num_each], key=_mean_logprob)
            for sequence, delta in ranked[-self._num_returned :][::-1]:
                renamed = copy(sequence)
                renamed.index = len(best)
                best.append((renamed, delta))
        return best

    def _frame(self, *, with_usage: bool | None = None, **fields: Any) -> bytes:
        usage: Usage | UnsetType | None = None if self._with_usage else UNSET
        if self._with_running_usage if with_usage is None else with_usage:
            usage = self._usage()
        chunk = msgspec.structs.replace(self._form.head, usage=usage, **fields)
        return b"".join([b"data: ", *self._form.lists.encoded(chunk), b"\n\n"])

    def _usage(self) -> Usage:
        """Count the tokens so far; each prompt counts once."""
        sequences = self._generation.sequences
        firsts = sequences[:: self._num_each]
        num_prompt_tokens = sum(sequence.num_prompt_tokens for sequence in firsts)
        num_output_tokens = sum(sequence.num_output_tokens for sequence in sequences)
        if self._is_echo_alone:
            num_output_tokens = 0  # no answer contains the sampled tokens
        num_cached_tokens = sum(sequence.num_cached_tokens for sequence in firsts)
        counters = [sequence.reasoning for sequence in sequences if sequence.reasoning is not None]
        num_reasoning_tokens = sum(counter.num_tokens for counter in counters)
        return Usage(
            num_prompt_tokens,
            num_output_tokens,
            num_prompt_tokens + num_output_tokens,
            PromptTokensDetails(num_cached_tokens),
            CompletionTokensDetails(num_reasoning_tokens) if counters else UNSET,
        )


def _mean_logprob(answer: EndedSequence) -> float:
    entries = answer[1].logprobs or []
    return sum(entry.logprob for entry in entries) / max(1, len(entries))


def _around_choices(pieces: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Divide the pieces of a response at its empty list of choices."""
    for i, piece in enumerate(pieces):
        before, found, after = piece.partition(_NO_CHOICES)
        if found:
            return [*pieces[:i], before], [after, *pieces[i + 1 :]]
    raise AssertionError("a response has choices")
