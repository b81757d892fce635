"""Response bodies in OpenAI's format, with vLLM's optional additions."""

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, UnsetType


def _list_of(schema: dict[str, Any]) -> msgspec.Meta:
    """Return the description of an array that an `EncodedList` has made, given its items'."""
    return msgspec.Meta(extra_json_schema={"type": "array", "items": schema})


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of the whole request; each prompt counts once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    """Only in chats with a model that may reason."""


class PromptProgress(msgspec.Struct, frozen=True):
    """Computed part of a prompt, in tokens, in the format of llama.cpp's server."""

    total: int
    cache: int
    processed: int
    """Number of computed tokens, including cached ones."""
    time_ms: int
    """Milliseconds since the request arrived."""


_NUMBER = {"type": "number"}
_NUMBERS: dict[str, Any] = {"type": "object", "additionalProperties": _NUMBER}


class CompletionLogprobs(msgspec.Struct):
    """Parallel lists, one item per token."""

    text_offset: Annotated[msgspec.Raw, _list_of({"type": "integer"})]
    token_logprobs: Annotated[msgspec.Raw, _list_of(_or_null(_NUMBER))]
    tokens: Annotated[msgspec.Raw, _list_of({"type": "string"})]
    top_logprobs: Annotated[msgspec.Raw, _list_of(_or_null(_NUMBERS))]
    """The candidates by their texts; null for a token without logprobs."""


class PromptLogprob(msgspec.Struct, frozen=True):
    """A candidate at one position of the prompt."""

    logprob: float
    rank: int | None
    decoded_token: str


_BY_TOKEN_ID = {
    "type": "object",
    "additionalProperties": {"$ref": "#/components/schemas/PromptLogprob"},
}
PromptLogprobList = Annotated[msgspec.Raw, _list_of(_or_null(_BY_TOKEN_ID))]
"""For each token of the prompt its candidates by token id, each a `PromptLogprob`; null for the
first token."""


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A sequence, or a part of one."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    resumed_inexactly: bool | UnsetType = UNSET
    """True if one engine's output was continued by another with different facts."""
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET


class Completion(msgspec.Struct, kw_only=True):
    """Response of /v1/completions, or one chunk of it."""

    id: str
    object: str = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


class ChatTopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatTopLogprob]


_TOKEN_LOGPROB = {"$ref": "#/components/schemas/ChatTokenLogprob"}


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: Annotated[msgspec.Raw, _list_of(_TOKEN_LOGPROB)]
    """A `ChatTokenLogprob` for each token."""
    refusal: None = None


class ToolCallFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    """A tool call made by the model."""

    id: str
    function: ToolCallFunction
    type: str = "function"


class FunctionDelta(msgspec.Struct, omit_defaults=True):
    name: str | None = None
    arguments: str | None = None


class ToolCallDelta(msgspec.Struct, omit_defaults=True):
    """A part of a call; only the first has its id, type and name."""

    index: int
    id: str | None = None
    type: str | None = None
    function: FunctionDelta = msgspec.field(default_factory=FunctionDelta)


class AssistantMessage(msgspec.Struct, frozen=True):
    """`reasoning` is vLLM's newer name for `reasoning_content`."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, omit_defaults=True, frozen=True):
    """A part of the message; only the first has a role."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None
    stop_reason: str | int | None = None
    resumed_inexactly: bool | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    resumed_inexactly: bool | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Response of /v1/chat/completions."""

    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    """One event of a streamed chat."""

    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET


DONE_FRAME = b"data: [DONE]\n\n"
