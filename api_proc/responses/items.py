"""The items of a conversation: what a request sends, and the messages of a chat that they become.

A chat has one message where responses have several items: the reasoning, the text and the calls of
one turn of the model become a single message of the assistant.
"""

from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from api_proc.errors import ApiError, invalid, unsupported
from api_proc.generation.messages import (
    MAX_MESSAGES,
    TEXT_PARTS,
    CalledFunction,
    ChatMessage,
    MessageToolCall,
)


class ItemPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """One part of an item's content; only text and refusals are supported."""

    type: str
    text: str | None = None
    refusal: str | None = None


Content = str | list[ItemPart]


class InputItem(msgspec.Struct, omit_defaults=True):
    """A message, a call of a function, its result, or reasoning; the type decides on the fields."""

    type: str | None = None
    """None: a message."""
    id: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: Content | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: Content | None = None
    summary: list[ItemPart] | None = None
    encrypted_content: str | None = None
    status: str | None = None


InputItems = Annotated[list[InputItem], Meta(max_length=MAX_MESSAGES)]

_REQUIRED = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments"),
    "function_call_output": ("call_id", "output"),
    "reasoning": (),
}
_PART_TYPES = {
    "message": TEXT_PARTS | {"refusal"},
    "function_call_output": TEXT_PARTS,
    "reasoning": frozenset({"reasoning_text", "text"}),
}
_ID_PREFIXES = {"message": "msg", "function_call": "fc", "function_call_output": "fco"}


def normalized(given: str | list[InputItem] | None) -> list[InputItem]:
    """Return the input of a request as items that have a type; text is a message of the user.

    The content of a message becomes a list of parts, as clients read it.
    """
    if not given:
        return []
    if isinstance(given, str):
        given = [InputItem(role="user", content=given)]
    for item in given:
        item.type = item.type or "message"
        if item.type == "message" and isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            item.content = [ItemPart(kind, item.content)]
    return given


def check_items(items: Sequence[InputItem]) -> None:
    """Reject items that this server does not support or that are incomplete."""
    for i, item in enumerate(items):
        where, kind = f"input[{i}]", item.type or "message"
        if kind not in _REQUIRED:
            raise unsupported(f"{where}.type", f"{kind[:64]!r} is not supported")
        for name in _REQUIRED[kind]:
            if getattr(item, name) is None:
                raise _missing(f"{where}.{name}")
        if kind == "reasoning":
            if item.content is None and not item.summary and item.encrypted_content:
                message = "is not supported: send the reasoning as text"
                raise unsupported(f"{where}.encrypted_content", message)
            _check_parts(item.summary or [], f"{where}.summary", frozenset({"summary_text"}))
        for name in ("content", "output"):
            parts = getattr(item, name)
            if isinstance(parts, list):
                _check_parts(parts, f"{where}.{name}", _PART_TYPES.get(kind, TEXT_PARTS))


def _check_parts(parts: list[ItemPart], where: str, types: frozenset[str]) -> None:
    for j, part in enumerate(parts):
        if part.type not in types:
            message = f"{part.type[:64]!r} is not supported, only text is"
            raise unsupported(f"{where}[{j}].type", message)
        name = "refusal" if part.type == "refusal" else "text"
        if getattr(part, name) is None:
            raise _missing(f"{where}[{j}].{name}")


def _missing(param: str) -> ApiError:
    return invalid(param, "the field is missing", "missing_required_parameter")


def with_ids(items: list[InputItem], response_id: str) -> list[InputItem]:
    """Return the items, each with an id."""
    named = []
    for number, item in enumerate(items):
        prefix = _ID_PREFIXES.get(item.type or "", "rs")
        item_id = item.id or f"{prefix}_{response_id.partition('_')[2]}_in{number}"
        named.append(msgspec.structs.replace(item, id=item_id))
    return named


def messages_of(instructions: str | None, items: Sequence[InputItem]) -> list[ChatMessage]:
    """Return the messages of a chat.

    Instructions and the system messages after them become one, because many templates accept only
    a single one at the start.
    """
    leading = list(takewhile(_is_system, items))
    texts = [instructions] if instructions else []
    texts += [_text(item.content) for item in leading]
    messages = [ChatMessage("system", "\n\n".join(texts))] if texts else []
    turn: ChatMessage | None = None  # consecutive items of the model are one message
    for item in items[len(leading) :]:
        if item.type == "function_call_output":
            turn = None
            messages.append(ChatMessage("tool", _text(item.output), tool_call_id=item.call_id))
        elif item.type == "message" and item.role != "assistant":
            turn = None
            role = "system" if _is_system(item) else item.role or "user"
            messages.append(ChatMessage(role, _text(item.content)))
        else:
            if turn is None or not _continues(turn, item):
                turn = ChatMessage("assistant")
                messages.append(turn)
            _extend(turn, item)
    return messages


def _is_system(item: InputItem) -> bool:
    return item.type == "message" and item.role in ("system", "developer")


def _continues(turn: ChatMessage, item: InputItem) -> bool:
    """Return whether an item belongs to the same message: reasoning, then text, then calls."""
    if item.type == "function_call":
        return True
    if item.type == "message":
        return turn.content is None and not turn.tool_calls
    return turn.content is None and not turn.tool_calls and turn.reasoning_content is None


def _extend(turn: ChatMessage, item: InputItem) -> None:
    if item.type == "function_call":
        function = CalledFunction(item.name or "", item.arguments)
        turn.tool_calls = [*(turn.tool_calls or []), MessageToolCall(function, item.call_id)]
    elif item.type == "message":
        turn.content = _text(item.content)
    else:
        turn.reasoning_content = _text(item.content or item.summary)


def _text(content: Content | None) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([part.text or part.refusal or "" for part in content or []])
