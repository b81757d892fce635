"""Translates the events of an output into OpenAI messages and message deltas."""

import hashlib
from collections.abc import Callable

from api_proc.chat.events import (
    ArgumentsDelta,
    ContentDelta,
    Event,
    ReasoningDelta,
    ToolCallEnd,
    ToolCallStart,
)
from api_proc.chat.formats import Dialect
from api_proc.http.connection import encode
from api_proc.openai.objects import (
    AssistantMessage,
    ChatDelta,
    FunctionDelta,
    ToolCall,
    ToolCallDelta,
    ToolCallFunction,
)

_ID_CHARACTERS = 24


def call_ids(key: str, dialect: Dialect) -> Callable[[int], str]:
    """Return a function that makes ids of calls; equal keys give equal ids."""

    def make_id(index: int) -> str:
        digest = hashlib.blake2b(f"{key} {index}".encode(), digest_size=16).hexdigest()
        if dialect.tools is not None and dialect.tools.id_characters is not None:
            return digest[: dialect.tools.id_characters]
        return "call_" + digest[:_ID_CHARACTERS]

    return make_id


def chat_delta(events: list[Event]) -> ChatDelta:
    """Return the events of one step as a single message delta."""
    calls: dict[int, ToolCallDelta] = {}
    for event in events:
        if isinstance(event, ToolCallStart):
            function = FunctionDelta(event.name, "")
            calls[event.index] = ToolCallDelta(event.index, event.id, "function", function)
        elif isinstance(event, ArgumentsDelta):
            call = calls.setdefault(event.index, ToolCallDelta(event.index))
            call.function.arguments = (call.function.arguments or "") + event.text
    reasoning = _joined(events, ReasoningDelta)
    return ChatDelta(
        content=_joined(events, ContentDelta),
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=list(calls.values()) or None,
    )


def plain_delta(events: list[Event]) -> bytes | None:
    """Return the JSON of a text-only delta up to the end of the text, as chunks contain it.

    None if the events contain anything else. This saves most of the time of `chat_delta`.
    """
    shown = [event for event in events if not isinstance(event, ToolCallEnd)]
    if not shown:
        return b""
    event = shown[0]
    if len(shown) > 1 or isinstance(event, ToolCallStart):
        return None
    text = encode(event.text)
    if isinstance(event, ContentDelta):
        return b'"delta":{"content":%b' % text
    if isinstance(event, ReasoningDelta):
        return b'"delta":{"reasoning_content":%b,"reasoning":%b' % (text, text)
    start = b'"delta":{"tool_calls":[{"index":%d,"function":{"arguments":%b}}]'
    return start % (event.index, text)


def assistant_message(events: list[Event]) -> AssistantMessage:
    """Return the events of a complete output as a message."""
    calls: list[ToolCall] = []
    arguments: list[list[str]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append(ToolCall(event.id, ToolCallFunction(event.name, "")))
            arguments.append([])
        elif isinstance(event, ArgumentsDelta):
            arguments[event.index].append(event.text)
    for call, pieces in zip(calls, arguments, strict=True):
        call.function.arguments = "".join(pieces)
    fields: dict[str, str | list[ToolCall]] = {}
    reasoning = _joined(events, ReasoningDelta)
    if reasoning is not None:
        fields |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if calls:
        fields["tool_calls"] = calls
    content = _joined(events, ContentDelta)
    if content is None and not fields:
        content = ""
    return AssistantMessage(content, **fields)  # type: ignore[arg-type]


def _joined(events: list[Event], kind: type[ContentDelta] | type[ReasoningDelta]) -> str | None:
    texts = [event.text for event in events if isinstance(event, kind)]
    return "".join(texts) if texts else None
