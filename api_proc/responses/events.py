"""The events of a streamed response: each has a type and a running number."""

from functools import cache

import msgspec

from api_proc.responses.objects import (
    ContentPart,
    EncodedLogprobs,
    OutputItem,
    Response,
    no_logprobs,
)


class Event(msgspec.Struct, kw_only=True, tag_field="type"):
    sequence_number: int = 0
    """Set when the event is sent."""


class Created(Event, kw_only=True, tag="response.created"):
    response: Response


class InProgress(Event, kw_only=True, tag="response.in_progress"):
    response: Response


class Completed(Event, kw_only=True, tag="response.completed"):
    response: Response


class Incomplete(Event, kw_only=True, tag="response.incomplete"):
    response: Response


class Failed(Event, kw_only=True, tag="response.failed"):
    response: Response


class ItemAdded(Event, kw_only=True, tag="response.output_item.added"):
    output_index: int
    item: OutputItem


class ItemDone(Event, kw_only=True, tag="response.output_item.done"):
    output_index: int
    item: OutputItem


class _OfItem(Event, kw_only=True):
    item_id: str
    output_index: int


class PartAdded(_OfItem, kw_only=True, tag="response.content_part.added"):
    content_index: int = 0
    part: ContentPart


class PartDone(_OfItem, kw_only=True, tag="response.content_part.done"):
    content_index: int = 0
    part: ContentPart


class TextDelta(_OfItem, kw_only=True, tag="response.output_text.delta"):
    content_index: int = 0
    delta: str
    logprobs: EncodedLogprobs = msgspec.field(default_factory=no_logprobs)


class TextDone(_OfItem, kw_only=True, tag="response.output_text.done"):
    content_index: int = 0
    text: str
    logprobs: EncodedLogprobs = msgspec.field(default_factory=no_logprobs)


class ReasoningTextDelta(_OfItem, kw_only=True, tag="response.reasoning_text.delta"):
    content_index: int = 0
    delta: str


class ReasoningTextDone(_OfItem, kw_only=True, tag="response.reasoning_text.done"):
    content_index: int = 0
    text: str


class CallArgumentsDelta(_OfItem, kw_only=True, tag="response.function_call_arguments.delta"):
    delta: str


class CallArgumentsDone(_OfItem, kw_only=True, tag="response.function_call_arguments.done"):
    name: str
    arguments: str


ResponseEvent = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | CallArgumentsDelta
    | CallArgumentsDone
)


@cache
def type_of(kind: type[Event]) -> bytes:
    """Return the type of an event as its JSON has it."""
    return str(kind.__struct_config__.tag).encode()
