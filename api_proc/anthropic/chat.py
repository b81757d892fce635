"""A body of the Messages API as the body of a chat, which takes the same path as other chats."""

import hashlib
from typing import Any

import msgspec

from api_proc.anthropic.bodies import (
    ClientTool,
    MessagesBody,
    PromptBody,
    Thinking,
    ToolChoice,
)
from api_proc.anthropic.history import chat_messages
from api_proc.bodies import ChatBody
from api_proc.chat.tools import ChosenFunction, FunctionTool, Tool, ToolChoiceObject
from api_proc.chat.tools import ToolChoice as ChatToolChoice
from api_proc.errors import invalid, unsupported
from api_proc.generation.messages import ChatMessage
from api_proc.generation.structured import JsonSchema, ResponseFormat
from api_proc.generation.unsupported_fields import reject_unsupported
from api_proc.http.json_body import BodyDecoder, Turn
from api_proc.unknown_fields import FOREIGN, refuse_foreign

_MAX_TENANT_CHARS = 256

FOREIGN_NAMES = dict.fromkeys((*FOREIGN, *ChatBody.__struct_fields__), "") | {
    "enable_thinking": "thinking",
    "include_reasoning": "thinking",
    "json_schema": "output_config",
    "max_completion_tokens": "max_tokens",
    "parallel_tool_calls": "tool_choice",
    "reasoning_effort": "output_config",
    "response_format": "output_config",
    "stop": "stop_sequences",
    "user": "metadata",
}
"""Fields of chats and of other servers that this route lacks, with the field to use instead."""


class MessagesChat(ChatBody, kw_only=True):
    """The chat that a body stands for."""

    token_limit: int | None = None
    """`max_tokens`. The output ends earlier where the model's context is full."""

    @property
    def default_max_tokens(self) -> int | None:
        return self.token_limit


class MessagesDecoder:
    """Decodes bodies of /v1/messages."""

    def __init__(self) -> None:
        self._decode = BodyDecoder(MessagesBody)

    def __call__(self, raw: bytes) -> MessagesChat:
        return chat_of(self._decode(raw))

    async def in_slices(self, raw: bytes, turn: Turn) -> tuple[MessagesChat, list[str]]:
        body, unknown = await self._decode.in_slices(raw, turn)
        refuse_foreign(raw, unknown, FOREIGN_NAMES)
        return chat_of(body), unknown


def chat_of(body: MessagesBody) -> MessagesChat:
    """Translate a body; fields that a chat cannot have are a 400 that names them."""
    user_id = "" if body.metadata is None else body.metadata.user_id or ""
    return msgspec.structs.replace(
        prompt_of(body),
        token_limit=body.max_tokens,
        stop=body.stop_sequences,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        user=_tenant(user_id),
        cache_salt=body.cache_salt,
    )


def prompt_of(body: PromptBody) -> MessagesChat:
    """Translate what the prompt is made of."""
    reject_unsupported(body, "")
    messages = chat_messages(body.system, body.messages)
    is_continued = bool(messages) and messages[-1].role == "assistant"
    if is_continued:
        _check_final(messages[-1], len(body.messages) - 1)
    choice = body.tool_choice
    config = body.output_config
    form = None if config is None else config.format
    return MessagesChat(
        model=body.model,
        messages=messages,
        continue_final_message=is_continued,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or [])],
        tool_choice=None if choice is None else _tool_choice(choice),
        parallel_tool_calls=not (choice is not None and choice.disable_parallel_tool_use),
        reasoning_effort=None if config is None else config.effort,
        response_format=None
        if form is None
        else ResponseFormat("json_schema", json_schema=JsonSchema(form.schema)),
        json_schema=None if body.output_format is None else body.output_format.schema,
        chat_template_kwargs=body.chat_template_kwargs,
        **_reasoning(body.thinking),
    )


def _check_final(message: ChatMessage, index: int) -> None:
    """Reject a final message of the assistant that the model cannot continue."""
    where = f"messages[{index}].content"
    if message.tool_calls:
        raise invalid(where, "needs the tool_result of its tool_use in a message after it")
    if not message.content:
        raise invalid(where, "needs text for the model to continue")


def _tool(tool: ClientTool, where: str) -> Tool:
    if tool.type not in (None, "custom"):
        text = f"{tool.type[:100]!r} is not supported, only tools that the client runs are"
        raise unsupported(f"{where}.type", text)
    if tool.input_schema is None:
        name = f"{where}.input_schema"
        raise invalid(name, "the field is missing", "missing_required_parameter")
    reject_unsupported(tool, f"{where}.")
    return Tool(FunctionTool(tool.name, tool.description, tool.input_schema, tool.strict))


def _tool_choice(choice: ToolChoice) -> ChatToolChoice:
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if choice.name is None:
        raise invalid("tool_choice.name", "the field is missing", "missing_required_parameter")
    return ToolChoiceObject("function", ChosenFunction(choice.name))


def _reasoning(thinking: Thinking | None) -> dict[str, Any]:
    """Return a chat's fields. Without `thinking` there is none, as in Anthropic's API."""
    if thinking is None or thinking.type == "disabled":
        return {"enable_thinking": False, "include_reasoning": False}
    return {
        "enable_thinking": True if thinking.type == "enabled" else None,
        "include_reasoning": thinking.display != "omitted",
        "thinking_token_budget": thinking.budget_tokens,
    }


def _tenant(user_id: str) -> str:
    if len(user_id) <= _MAX_TENANT_CHARS:
        return user_id
    return hashlib.blake2b(user_id.encode(), digest_size=16).hexdigest()
