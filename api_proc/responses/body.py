"""The body of POST /v1/responses, and the chat that it stands for.

The chat route does the work, so a body is translated into a `ChatBody`: fields of the same name are
copied, and the others have a counterpart. Errors of the chat route are translated back, so that
they have the names of this route.
"""

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta

from api_proc.bodies import ChatBody, CommonBody, CompletionBody
from api_proc.chat.tools import (
    MAX_TOOLS,
    AllowedTool,
    AllowedTools,
    ChosenFunction,
    FunctionTool,
    Tool,
    ToolChoice,
    ToolChoiceObject,
    ToolName,
)
from api_proc.errors import ApiError, invalid, unsupported
from api_proc.generation.structured import JsonSchema, ResponseFormat
from api_proc.generation.unsupported_fields import Unsupported, reject_unsupported
from api_proc.http.json_body import BodyDecoder, Turn
from api_proc.responses.items import InputItems, check_items, normalized
from protocol import sampling

_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = frozenset({_LOGPROBS, "reasoning.encrypted_content"})
"""Accepted values of `include`. Reasoning is always returned as text, so nothing is encrypted."""

Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]],
    Meta(max_length=16),
]
ResponseId = Annotated[str, Meta(min_length=1, max_length=200)]


class TextFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the text of the answer is confined to."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(msgspec.Struct, frozen=True):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class ResponseTool(msgspec.Struct, frozen=True):
    """A function; the other types of tools are refused."""

    type: str
    name: ToolName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct, frozen=True):
    type: str
    name: str | None = None


class ResponseToolChoice(msgspec.Struct, frozen=True, omit_defaults=True):
    """One tool by name, or some of the tools."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[NamedTool] = []


class ResponseStreamOptions(msgspec.Struct, frozen=True):
    include_obfuscation: bool | None = None


class ResponsesBody(CommonBody, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | InputItems | None = None
    instructions: str | None = None
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    background: bool | None = None
    metadata: Metadata | None = None
    include: Annotated[list[str], Meta(max_length=16)] | None = None
    max_output_tokens: sampling.MaxTokens | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None
    top_logprobs: sampling.NumLogprobs | None = None
    conversation: Unsupported = UNSET
    prompt: Unsupported = UNSET
    context_management: Unsupported = UNSET
    moderation: Unsupported = UNSET
    previous_input_messages: Unsupported = UNSET
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    include_reasoning: bool | None = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    def check(self) -> None:
        """Reject contradictory and unsupported fields with a 400 that names the field."""
        reject_unsupported(self, "")
        if not self.input and self.previous_response_id is None:
            why = "the field is missing" if self.input is None else "is empty"
            raise invalid("input", why, "missing_required_parameter")
        if self.background:
            raise unsupported("background", "is not supported; use stream, or wait for the answer")
        if self.stream_options not in (None, ResponseStreamOptions()) and not self.stream:
            raise invalid("stream_options", "is allowed only with stream")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation")
        for i, value in enumerate(self.include or []):
            if value not in _INCLUDED:
                known = f"only {' and '.join(sorted(_INCLUDED))} are"
                raise unsupported(f"include[{i}]", f"{value[:64]!r} is not supported, {known}")
        if self.text is not None and self.text.verbosity in ("low", "high"):
            raise unsupported("text.verbosity", "other than medium is not supported")
        for i, tool in enumerate(self.tools or []):
            if tool.type != "function":
                message = f"{tool.type[:64]!r} is not supported, only function is"
                raise unsupported(f"tools[{i}].type", message)
            if tool.name is None:
                raise invalid(
                    f"tools[{i}].name", "the field is missing", "missing_required_parameter"
                )
        check_items(self.input if isinstance(self.input, list) else [])


class ResponsesChat(ChatBody, kw_only=True):
    """The chat that a request for a response stands for; its messages are added later."""

    request: ResponsesBody


_CONVERTED = frozenset(
    {"stream_options", "tools", "tool_choice", "top_logprobs", "response_format"}
)
_FIELDS = frozenset(ResponsesBody.__struct_fields__)
_COPIED = tuple((_FIELDS & set(ChatBody.__struct_fields__)) - _CONVERTED)
_OTHER_ROUTES = (set(ChatBody.__struct_fields__) | set(CompletionBody.__struct_fields__)) - _FIELDS
_COUNTERPARTS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include and top_logprobs",
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice"), "structured_outputs"),
    **dict.fromkeys(("guided_grammar", "json_schema", "grammar"), "structured_outputs"),
}


class ResponseDecoder:
    """Decodes bodies, and translates them."""

    def __init__(self) -> None:
        self._decoder = BodyDecoder(ResponsesBody)

    def __call__(self, raw: bytes) -> ResponsesChat:
        return _chat_of(self._decoder(raw))

    async def in_slices(self, raw: bytes, turn: Turn) -> tuple[ResponsesChat, list[str]]:
        body, unknown = await self._decoder.in_slices(raw, turn)
        foreign = [name for name in unknown if name in _OTHER_ROUTES]
        if foreign:
            values = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
            for name in foreign:
                if bytes(values[name]).strip() != b"null":
                    hint = f"; use {_COUNTERPARTS[name]}" if name in _COUNTERPARTS else ""
                    raise unsupported(name, f"is not a field of this route{hint}")
        return _chat_of(body), [name for name in unknown if name not in foreign]


def _chat_of(body: ResponsesBody) -> ResponsesChat:
    body.check()
    body.input = normalized(body.input)
    return ResponsesChat(
        messages=[],
        request=body,
        max_completion_tokens=body.max_output_tokens,
        logprobs=bool(body.top_logprobs) or _LOGPROBS in (body.include or []),
        top_logprobs=body.top_logprobs,
        reasoning_effort=None if body.reasoning is None else body.reasoning.effort,
        response_format=_response_format(body.text),
        tools=_tools(body.tools),
        tool_choice=_tool_choice(body.tool_choice),
        **{name: getattr(body, name) for name in _COPIED},
    )


def _response_format(text: TextOptions | None) -> ResponseFormat | None:
    form = None if text is None else text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return ResponseFormat("json_object")
    schema = JsonSchema(form.schema, form.name, form.description, form.strict)
    return ResponseFormat("json_schema", schema)


def _tools(tools: list[ResponseTool] | None) -> list[Tool] | None:
    if tools is None:
        return None
    return [
        Tool(FunctionTool(tool.name or "", tool.description, tool.parameters, tool.strict))
        for tool in tools
    ]


def _tool_choice(choice: str | ResponseToolChoice | None) -> ToolChoice | None:
    if not isinstance(choice, ResponseToolChoice):
        return choice  # type: ignore[return-value]
    if choice.type == "function":
        function = None if choice.name is None else ChosenFunction(choice.name)
        return ToolChoiceObject("function", function)
    if choice.type != "allowed_tools":
        raise unsupported("tool_choice.type", f"{choice.type[:64]!r} is not supported")
    allowed = []
    for i, tool in enumerate(choice.tools):
        if tool.type != "function":
            message = f"{tool.type[:64]!r} is not supported, only function is"
            raise unsupported(f"tool_choice.tools[{i}].type", message)
        allowed.append(AllowedTool(ChosenFunction(tool.name or "")))
    return ToolChoiceObject("allowed_tools", None, AllowedTools(choice.mode, allowed))


_RENAMED = (
    (re.compile(r"response_format\.json_schema\b"), "text.format"),
    (re.compile(r"response_format\b"), "text.format"),
    (re.compile(r"max_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"messages\b"), "input"),
    (re.compile(r"tools\[(\d+)\]\.function\b"), r"tools[\1]"),
    (re.compile(r"tool_choice\.function$"), "tool_choice.name"),
    (re.compile(r"tool_choice\.(function|allowed_tools)\b"), "tool_choice"),
)


def renamed(error: ApiError) -> ApiError:
    """Return an error of the chat route with the names of this route."""
    param = error.param
    if param is None or error.code == "unsupported_parameter":  # it has the client's own name
        return error
    for pattern, name in _RENAMED:
        if pattern.match(param):
            new = pattern.sub(name, param, count=1)
            message = error.message
            if message.startswith(param):
                message = new + message[len(param) :]
            message = message.replace("response_format", "text.format")
            return ApiError(
                error.status, message, param=new, code=error.code, headers=error.headers
            )
    return error
