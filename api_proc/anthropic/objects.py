"""Response bodies and stream events of the Messages API."""

from typing import Any, Literal

import msgspec

from api_proc.anthropic.blocks import OutputBlock
from api_proc.http.connection import encode

StopReason = Literal[
    "end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"
]


class MessageUsage(msgspec.Struct, frozen=True):
    """The prompt has `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class Message(msgspec.Struct, kw_only=True):
    """Answer of /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(msgspec.Struct):
    """Answer of /v1/messages/count_tokens."""

    input_tokens: int


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    message: Message


class ContentBlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    index: int
    content_block: OutputBlock


class TextBlockDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    text: str


class ThinkingBlockDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    partial_json: str


class ContentBlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextBlockDelta | ThinkingBlockDelta | SignatureDelta | InputJsonDelta


class ContentBlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(msgspec.Struct):
    """What a stream adds to its message at the end."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    pass


class Ping(msgspec.Struct, tag_field="type", tag="ping"):
    pass


class MessageError(msgspec.Struct):
    """What was wrong with a request; `param` and `code` are additions of this server."""

    type: str
    message: str
    param: str | None
    """The field that has a bad value."""
    code: str | None


class MessageErrorResponse(msgspec.Struct, tag_field="type", tag="error"):
    """The response to every request that fails, and the event that ends a stream that does."""

    error: MessageError
    request_id: str


StreamEvent = (
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
    | MessageErrorResponse
)


def frame(event: Any) -> bytes:
    """Return a server-sent event, which has its type as its name too."""
    name: str = type(event).__struct_config__.tag
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode(event))
