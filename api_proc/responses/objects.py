"""The response object and its output items, in OpenAI's shape."""

from typing import Annotated, Any

import msgspec

RESPONSE_PREFIX = "resp_"
"""Prefix of the ids of responses."""

_TOKEN_LOGPROB = {"$ref": "#/components/schemas/ChatTokenLogprob"}
EncodedLogprobs = Annotated[
    msgspec.Raw, msgspec.Meta(extra_json_schema={"type": "array", "items": _TOKEN_LOGPROB})
]
"""JSON of the logprobs of tokens, or what stands for it: see `EncodedLists`. They are encoded once,
and five events at the end of a stream contain them."""
NO_LOGPROBS = msgspec.Raw(b"[]")


def no_logprobs() -> msgspec.Raw:
    """Return the default of a field: the OpenAPI document cannot contain that of a value."""
    return NO_LOGPROBS


class OutputText(msgspec.Struct, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = []
    logprobs: EncodedLogprobs = msgspec.field(default_factory=no_logprobs)


class ReasoningText(msgspec.Struct, tag_field="type", tag="reasoning_text"):
    text: str


ContentPart = OutputText | ReasoningText


class OutputMessage(msgspec.Struct, tag_field="type", tag="message"):
    id: str
    status: str
    content: list[OutputText]
    role: str = "assistant"


class FunctionCall(msgspec.Struct, tag_field="type", tag="function_call"):
    id: str
    status: str
    call_id: str
    name: str
    arguments: str


class ReasoningItem(msgspec.Struct, tag_field="type", tag="reasoning"):
    """The model's reasoning as text; no summary is made of it."""

    id: str
    status: str
    content: list[ReasoningText]
    summary: list[Any] = []
    encrypted_content: None = None


OutputItem = OutputMessage | FunctionCall | ReasoningItem


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, frozen=True):
    code: str | None
    message: str
    param: str | None = None


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ReasoningSettings(msgspec.Struct, frozen=True):
    effort: str | None
    summary: str | None


class Response(msgspec.Struct, kw_only=True):
    """Response of POST and GET /v1/responses."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    """"in_progress", "completed", "incomplete", "failed" or "cancelled"."""
    background: bool = False
    error: ResponseError | None = None
    frequency_penalty: float
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    presence_penalty: float
    previous_response_id: str | None
    reasoning: ReasoningSettings
    service_tier: str = "default"
    """There is one tier, whichever the request names."""
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None


class Deleted(msgspec.Struct, kw_only=True):
    """Response of DELETE /v1/responses/{id}."""

    id: str
    object: str = "response"
    deleted: bool = True


class InputTokens(msgspec.Struct):
    """Response of POST /v1/responses/input_tokens."""

    input_tokens: int
    object: str = "response.input_tokens"
