"""Renders the answer of a generation: whole bodies and server-sent events."""

from typing import Any, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from api_proc.bodies import SamplingBody
from api_proc.openai import responses
from api_proc.openai.chat_message import plain_delta
from api_proc.openai.generation import Generation
from api_proc.openai.responses import PromptTokensDetails, Usage
from api_proc.text.output_sequence import Delta, OutputSequence, join


class Format(Protocol):
    """The shape of one route's answers; chats and completions differ in their choices."""

    @property
    def head(self) -> msgspec.Struct:
        """A chunk with an empty list of choices."""

    @property
    def plain_choice(self) -> tuple[bytes, bytes]:
        """JSON before and after the text in the choice of a chunk that has nothing else."""

    @property
    def echoes_prompt(self) -> bool:
        """Whether the first text begins with the prompt."""

    def opening(self, sequence: OutputSequence) -> dict[str, Any] | None:
        """Return the fields of the chunk before the first text, if there is one."""

    def choice(self, sequence: OutputSequence, delta: Delta, *, is_first: bool) -> msgspec.Struct:
        """Return a chunk's choice."""

    def whole(self, answers: list[tuple[OutputSequence, Delta]], usage: Usage) -> msgspec.Struct:
        """Return the whole answer."""


class Reply:
    def __init__(self, form: Format, body: SamplingBody, generation: Generation) -> None:
        self._form = form
        self._generation = generation
        self._num_each = body.n or 1
        options = body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._with_running_usage = bool(options and options.continuous_usage_stats)
        self._is_plain = not (self._with_running_usage or body.return_token_ids)
        self.begun: set[int] = set()
        """Sequences that have begun, in this answer or an earlier one."""
        self._deltas: dict[int, list[Delta]] = {}
        head = responses.encode(form.head)
        assert head.endswith(b"]}")
        before, after = form.plain_choice
        usage = b',"usage":null' if self._with_usage else b""
        self._plain_start = b"data: " + head[:-2] + b'{"index":'
        self._plain_text = b"," + before
        self._plain_end = after + b"}]" + usage + b"}\n\n"

    def frames(self, sequence: OutputSequence, delta: Delta) -> list[bytes]:
        """Return the events for a delta; only the last one contains its tokens.

        Most chunks consist of text alone and are put together from prepared bytes.
        """
        form = self._form
        events = []
        is_first = sequence.index not in self.begun
        if is_first:
            self.begun.add(sequence.index)
            if opening := form.opening(sequence):
                events.append(self._frame(**opening))
        is_plain = self._is_plain and delta.finish_reason is None and delta.logprobs is None
        is_plain = is_plain and not (is_first and form.echoes_prompt)
        if is_plain and delta.events is None:
            if delta.text:
                text = responses.encode(delta.text)
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

    def usage_frame(self) -> bytes:
        """Return the event with the usage and without choices, if it was asked for."""
        return self._frame(with_usage=True, choices=[]) if self._with_usage else b""

    def collect(self, sequence: OutputSequence, delta: Delta) -> None:
        self._deltas.setdefault(sequence.index, []).append(delta)

    def body(self) -> bytes:
        sequences = self._generation.sequences
        answers = [(sequence, join(self._deltas[sequence.index])) for sequence in sequences]
        return responses.encode(self._form.whole(answers, self._usage()))

    def _frame(self, *, with_usage: bool | None = None, **fields: Any) -> bytes:
        usage: Usage | UnsetType | None = None if self._with_usage else UNSET
        if self._with_running_usage if with_usage is None else with_usage:
            usage = self._usage()
        chunk = msgspec.structs.replace(self._form.head, usage=usage, **fields)
        return b"data: %b\n\n" % responses.encode(chunk)

    def _usage(self) -> Usage:
        """Count the tokens so far; each prompt counts once."""
        sequences = self._generation.sequences
        firsts = sequences[:: self._num_each]
        num_prompt_tokens = sum(sequence.num_prompt_tokens for sequence in firsts)
        num_output_tokens = sum(sequence.num_output_tokens for sequence in sequences)
        num_cached_tokens = sum(sequence.num_cached_tokens for sequence in firsts)
        return Usage(
            num_prompt_tokens,
            num_output_tokens,
            num_prompt_tokens + num_output_tokens,
            PromptTokensDetails(num_cached_tokens),
        )
