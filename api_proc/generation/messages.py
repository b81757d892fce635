"""The messages of a chat: their structs, their form in templates, and their bounds."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta

from api_proc.errors import invalid, unsupported
from api_proc.generation.unsupported_fields import Unsupported, reject_unsupported
from api_proc.http.json_scan import MAX_DEPTH, MAX_VALUES, max_depth, max_num_values
from protocol.config.rules import RESERVED_TEMPLATE_NAMES

MAX_MESSAGES = 4096
TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""Types of the parts of a message that are text: of chats, and of the newer responses."""


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content: text, or a refusal of an earlier answer."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """The arguments are JSON text; an object is accepted too."""

    name: str
    arguments: str | dict[str, Any] | None = None

    @property
    def for_template(self) -> dict[str, Any]:
        """Most templates expect an object; text that is not one is left to the template.

        So is an object with more levels than a body may have.
        """
        arguments: Any = self.arguments or {}
        if isinstance(arguments, str) and max_depth(arguments) <= MAX_DEPTH:
            try:
                decoded = msgspec.json.decode(arguments)
            except msgspec.DecodeError:
                decoded = None
            arguments = decoded if isinstance(decoded, dict) else arguments
        return {"name": self.name, "arguments": arguments}


class MessageToolCall(msgspec.Struct, frozen=True):
    """A call that the model made earlier in the chat."""

    function: CalledFunction
    id: str | None = None
    type: Literal["function"] = "function"

    @property
    def for_template(self) -> dict[str, Any]:
        call: dict[str, Any] = {"type": self.type, "function": self.function.for_template}
        return call if self.id is None else {"id": self.id} | call


class ChatMessage(msgspec.Struct):
    role: Annotated[str, Meta(min_length=1, max_length=64)]
    """The chat template decides which ones it knows; `developer` is another name of `system`."""
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Annotated[list[MessageToolCall], Meta(max_length=1024)] | None = None
    function_call: Unsupported = UNSET
    audio: Unsupported = UNSET
    images: Unsupported = UNSET
    prefix: Unsupported = UNSET

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates expect it: text in one piece, no absent fields."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join([part.text or part.refusal or "" for part in content])
        role = "system" if self.role == "developer" else self.role
        result: dict[str, Any] = {"role": role, "content": content or ""}
        for name in ("name", "tool_call_id"):
            value = getattr(self, name)
            if value is not None:
                result[name] = value
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if reasoning is not None:
            result["reasoning_content"] = reasoning
        if self.tool_calls:
            result["content"] = content
            result["tool_calls"] = [call.for_template for call in self.tool_calls]
        return result


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


def check_chat_prompt(messages: list[ChatMessage], kwargs: dict[str, Any] | None) -> None:
    """Reject content other than text, and template variables that the server sets."""
    for i, message in enumerate(messages):
        reject_unsupported(message, f"messages[{i}].")
        if message.content is None and message.role != "assistant":
            reason = "must be a string or an array; only an assistant's message may be without it"
            raise invalid(f"messages[{i}].content", reason)
        for j, part in enumerate(message.content if isinstance(message.content, list) else []):
            where = f"messages[{i}].content[{j}]"
            is_refusal = part.type == "refusal" and message.role == "assistant"
            if part.type not in TEXT_PARTS and not is_refusal:
                raise unsupported(f"{where}.type", f"{part.type!r} is not supported, only text is")
            name = "refusal" if is_refusal else "text"
            if getattr(part, name) is None:
                raise invalid(f"{where}.{name}", "the field is missing")
    check_arguments(messages)
    check_template_kwargs(kwargs)


def check_template_kwargs(kwargs: dict[str, Any] | None) -> None:
    """Reject template variables that the server sets."""
    for name in RESERVED_TEMPLATE_NAMES.intersection(kwargs or {}):
        raise invalid(f"chat_template_kwargs.{name}", "is set by the server", "not_allowed")


def check_arguments(messages: list[ChatMessage], param: str | None = None) -> None:
    """Bound the JSON texts in the messages like the body itself: templates get them decoded.

    `param` is the field to name; None: the call in `messages`.
    """
    num_values = 0
    for i, message in enumerate(messages):
        for j, call in enumerate(message.tool_calls or ()):
            arguments = call.function.arguments
            if isinstance(arguments, str):
                num_values += max_num_values(arguments)
            if num_values > MAX_VALUES:
                where = f"messages[{i}].tool_calls[{j}].function.arguments"
                text = f"the arguments of calls have more than {MAX_VALUES} values"
                raise invalid(param or where, text)


def check_continuation(
    messages: list[ChatMessage], add_generation_prompt: bool | None, is_continued: bool
) -> None:
    """Reject a final message that cannot be continued."""
    if not is_continued:
        return
    if add_generation_prompt:
        message = "excludes add_generation_prompt, which begins another message"
        raise invalid("continue_final_message", message)
    if not messages[-1].for_template()["content"]:
        raise invalid("continue_final_message", "needs text in the final message")
