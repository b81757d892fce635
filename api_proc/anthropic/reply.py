"""Renders the answer to a message: a whole message, or the events of a stream.

The events of a stream are a function of the output's text, however it arrives in pieces. So a
client can continue after any of them: the offset of an event in its step counts characters of text,
and 1 for an event without text.
"""

from collections.abc import Iterator
from typing import Any

import msgspec

from api_proc.anthropic.blocks import OutputBlock, TextBlock, ThinkingBlock, ToolUseBlock
from api_proc.anthropic.chat import MessagesChat
from api_proc.anthropic.errors import render_error
from api_proc.anthropic.objects import (
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    Message,
    MessageDelta,
    MessageEnd,
    MessageStart,
    MessageStop,
    MessageUsage,
    SignatureDelta,
    StopReason,
    frame,
)
from api_proc.anthropic.positions import EventPosition, parse_position
from api_proc.chat.events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallEnd,
    ToolCallStart,
    merged,
)
from api_proc.errors import ApiError
from api_proc.generation.generation import Generation
from api_proc.http.connection import Connection, encode
from api_proc.state import ApiState
from api_proc.text.output_sequence import Delta, OutputSequence, join
from protocol.sampling import FinishReason

_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%%d,"delta":'
    b'{"type":"%b","%b":%%b}}\n\n'
)
_DELTAS = {
    ContentDelta: _DELTA % (b"text_delta", b"text"),
    ReasoningDelta: _DELTA % (b"thinking_delta", b"thinking"),
    ArgumentsDelta: _DELTA % (b"input_json_delta", b"partial_json"),
}
TEXTS = (ContentDelta, ReasoningDelta, ArgumentsDelta)
INVALID_JSON = "INVALID_JSON"
"""Name in the input of a call whose arguments are not a JSON object, with their text."""

Part = tuple[bytes, str | None]
"""A frame; one with text is a template for the text's JSON."""


class MessageReply:
    """Renders the answer of one generation, which has a single sequence."""

    def __init__(
        self, state: ApiState, connection: Connection, body: MessagesChat, generation: Generation
    ) -> None:
        self._id = f"msg_{generation.request_id}"
        self._model = state.shown_model(body.model)
        self._token_limit = state.text.defaults.bounded(body.token_limit or 0)
        self._sequences = generation.sequences
        self._blocks = _OpenBlocks(signature=self._id)
        self._deltas: list[Delta] = []
        self._request_id = generation.request_id
        self._is_resumable = generation.is_resumable
        known = None
        if generation.position is not None and connection.last_event_id is not None:
            known = parse_position(connection.last_event_id, generation.request_id)
        self._has_begun = known is not None
        self._is_closed = known is not None and known.is_end
        self._num_tokens = 0 if known is None else known.num_tokens
        self._num_known = 0 if known is None else known.offset
        """Characters of the next events that the client has."""

    def collect(self, sequence: OutputSequence, delta: Delta) -> None:
        self._deltas.append(delta)

    def body(self) -> list[bytes]:
        delta = join(self._deltas)
        message = self._message(content_blocks(_events_of(delta), signature=self._id))
        message.stop_reason, message.stop_sequence = self._stop_reason(self._sequences[0], delta)
        return [encode(message)]

    def skip(self, sequence: OutputSequence, delta: Delta) -> None:
        for _ in self._blocks.parts(delta):
            pass

    def frames(self, sequence: OutputSequence, delta: Delta) -> list[bytes]:
        if delta.finish_reason is None and not self._num_known:
            only = self._blocks.continued(delta)
            if only is not None:
                self._num_tokens += len(delta.token_ids)
                return [self._tagged(only, EventPosition(self._num_tokens))]
        found: list[tuple[bytes, int]] = []
        offset = 0
        if not self._has_begun:
            self._has_begun = True
            found.append((frame(MessageStart(self._message([]))), 0))
        for form, text in self._parts(sequence, delta):
            size = 1 if text is None else len(text)
            offset += size
            num_known = min(size, self._num_known)
            self._num_known -= num_known
            if num_known < size:
                shown = form if text is None else form % encode(text[num_known:])
                found.append((shown, offset))
        frames = [
            self._tagged(item, EventPosition(self._num_tokens, at)) for item, at in found[:-1]
        ]
        self._num_tokens += len(delta.token_ids)
        return frames + [
            self._tagged(item, EventPosition(self._num_tokens)) for item, _ in found[-1:]
        ]

    def last_frames(self) -> list[bytes]:
        if self._is_closed:
            return []
        return [self._tagged(frame(MessageStop()), EventPosition(self._num_tokens, is_end=True))]

    def failure(self, error: ApiError) -> list[bytes]:
        return [b"event: error\ndata: %b\n\n" % render_error(error, self._request_id)]

    async def keep(self) -> None:
        """Nothing to do: messages are not stored."""

    def _tagged(self, event: bytes, position: EventPosition) -> bytes:
        """Add an id, if the stream can be resumed."""
        if not self._is_resumable:
            return event
        return b"%b%b\n" % (event[:-1], position.id_line(self._request_id))

    def _parts(self, sequence: OutputSequence, delta: Delta) -> Iterator[Part]:
        yield from self._blocks.parts(delta)
        if delta.finish_reason is not None:
            yield from self._blocks.end()
            reason, stop_sequence = self._stop_reason(sequence, delta)
            end = MessageDelta(MessageEnd(reason, stop_sequence), self._usage())
            yield frame(end), None

    def _message(self, content: list[OutputBlock]) -> Message:
        usage = self._usage()
        return Message(id=self._id, model=self._model, content=content, usage=usage)

    def _usage(self) -> MessageUsage:
        [sequence] = self._sequences
        num_cached = sequence.num_cached_tokens
        return MessageUsage(
            sequence.num_prompt_tokens - num_cached, sequence.num_output_tokens, num_cached
        )

    def _stop_reason(self, sequence: OutputSequence, delta: Delta) -> tuple[StopReason, str | None]:
        if delta.finish_reason == FinishReason.LENGTH:
            if sequence.num_output_tokens < self._token_limit:
                return "model_context_window_exceeded", None
            return "max_tokens", None
        if isinstance(delta.stop_reason, str):
            return "stop_sequence", delta.stop_reason
        if sequence.parser is not None and sequence.parser.num_calls:
            return "tool_use", None
        return "end_turn", None


class _OpenBlocks:
    """The content blocks of a stream: one at a time is open."""

    def __init__(self, *, signature: str) -> None:
        self._signature = signature
        self._index = -1
        self._kind: type[Event] | None = None
        """Deltas of the open block."""
        self._form = b""
        """Their frames, without the text."""

    def continued(self, delta: Delta) -> bytes | None:
        """Return the frame of a delta that is just more text of the open block.

        It saves most of the time of `parts`.
        """
        kind: type[Event] = ContentDelta
        text = delta.text
        if delta.events is not None:
            if len(delta.events) != 1 or not isinstance(delta.events[0], TEXTS):
                return None
            kind, text = type(delta.events[0]), delta.events[0].text
        return self._form % encode(text) if text and kind is self._kind else None

    def parts(self, delta: Delta) -> Iterator[Part]:
        """Return the frames for a delta."""
        for event in merged(_events_of(delta)):
            if isinstance(event, ToolCallStart):
                yield from self.end()
                yield self._begin(ToolUseBlock(event.id, event.name, {}), ArgumentsDelta)
            elif isinstance(event, ToolCallEnd):
                if self._kind is ArgumentsDelta:
                    yield from self.end()
            else:
                kind = type(event)
                if self._kind is not kind:
                    yield from self.end()
                    is_content = isinstance(event, ContentDelta)
                    yield self._begin(TextBlock("") if is_content else ThinkingBlock(""), kind)
                yield self._form, event.text

    def _begin(self, block: OutputBlock, kind: type[Event]) -> Part:
        self._index += 1
        self._kind = kind
        self._form = _DELTAS[kind].replace(b"%d", b"%d" % self._index)
        return frame(ContentBlockStart(self._index, block)), None

    def end(self) -> Iterator[Part]:
        """Return the frames that end the open block, if there is one."""
        if self._kind is None:
            return
        if self._kind is ReasoningDelta:
            delta = SignatureDelta(self._signature)
            yield frame(ContentBlockDelta(self._index, delta)), None
        self._kind = None
        yield frame(ContentBlockStop(self._index)), None


def _events_of(delta: Delta) -> list[Event]:
    if delta.events is not None:
        return delta.events
    return [ContentDelta(delta.text)] if delta.text else []


def content_blocks(events: list[Event], *, signature: str) -> list[OutputBlock]:
    """Return the blocks of a whole message."""
    blocks: list[OutputBlock] = []
    arguments: dict[int, str] = {}
    calls: list[ToolUseBlock] = []
    for event in merged(events):
        if isinstance(event, ContentDelta):
            blocks.append(TextBlock(event.text))
        elif isinstance(event, ReasoningDelta):
            blocks.append(ThinkingBlock(event.text, signature))
        elif isinstance(event, ToolCallStart):
            calls.append(ToolUseBlock(event.id, event.name, {}))
            blocks.append(calls[-1])
        elif isinstance(event, ArgumentsDelta):
            arguments[event.index] = event.text
    for index, text in arguments.items():
        calls[index].input = _input(text)
    return blocks


def _input(arguments: str) -> dict[str, Any]:
    try:
        decoded = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        decoded = None
    return decoded if isinstance(decoded, dict) else {INVALID_JSON: arguments}
