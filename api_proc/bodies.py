"""What requests may say: one struct per body, with the bounds of protocol/sampling.py.

Unknown fields are ignored, as OpenAI's own clients need it; known fields with a wrong type or value
are refused. Fields of features that this server lacks are listed, so that asking for one of them is
an error instead of a silently different answer.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from api_proc.errors import invalid, unsupported
from protocol.api_core import Tenant
from protocol.message import TokenId
from protocol.sampling import (
    CacheSalt,
    LogitBias,
    MaxTokens,
    MinP,
    MinTokens,
    NumLogprobs,
    NumSequences,
    Penalty,
    Priority,
    RepetitionPenalty,
    Seed,
    StopString,
    StopStrings,
    StopTokenIds,
    Temperature,
    TopK,
    TopP,
)

MAX_PROMPTS = 2048
MAX_MESSAGES = 4096
MAX_TOKENS_PER_PROMPT = 2**21

PromptText = Annotated[str, Meta(min_length=1)]
PromptIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS_PER_PROMPT)]
PromptItems = Annotated[
    list[PromptText | TokenId | PromptIds], Meta(min_length=1, max_length=MAX_TOKENS_PER_PROMPT)
]
TruncateTokens = Annotated[int, Meta(ge=-1, lt=2**31)]
Unsupported = Raw | UnsetType


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """`response_format`; only text is served."""

    type: str


class SamplingBody(msgspec.Struct, kw_only=True):
    """The fields that completions and chat share. None: the server's default."""

    model: str | None = None
    n: NumSequences | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    seed: Seed | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    logit_bias: LogitBias | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: MinTokens | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: NumLogprobs | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: TruncateTokens | None = None
    add_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None
    user: Tenant | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: Unsupported = UNSET
    guided_json: Unsupported = UNSET
    guided_regex: Unsupported = UNSET
    guided_choice: Unsupported = UNSET
    guided_grammar: Unsupported = UNSET
    allowed_token_ids: Unsupported = UNSET
    bad_words: Unsupported = UNSET
    logits_processors: Unsupported = UNSET
    use_beam_search: bool | None = None

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


class CompletionBody(SamplingBody, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: PromptText | PromptItems
    best_of: Annotated[int, Meta(ge=1)] | None = None
    echo: bool | None = None
    logprobs: NumLogprobs | None = None
    suffix: Unsupported = UNSET
    prompt_embeds: Unsupported = UNSET


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text is served."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: Unsupported = UNSET
    function_call: Unsupported = UNSET


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatBody(SamplingBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Unsupported = UNSET
    continue_final_message: bool | None = None
    documents: Unsupported = UNSET
    tools: Unsupported = UNSET
    tool_choice: Unsupported = UNSET
    functions: Unsupported = UNSET
    function_call: Unsupported = UNSET
    modalities: list[str] | None = None
    audio: Unsupported = UNSET
    prediction: Unsupported = UNSET
    web_search_options: Unsupported = UNSET


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS_PER_PROMPT)]
    model: str | None = None


RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "documents", "tokenize", "chat_template", "add_generation_prompt"}
)
_HARMLESS = frozenset({b"null", b"[]", b"{}", b'""', b"false", b'"none"', b'"auto"'})


def check_completion(body: CompletionBody) -> None:
    """Refuse contradictions between fields.

    Raises:
        ApiError: 400 naming the field.
    """
    _check_common(body)
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise invalid("best_of", f"must be equal to n, which is {body.n or 1}")


def check_chat(body: ChatBody) -> None:
    """Refuse contradictions between fields, and content that is not text.

    Raises:
        ApiError: 400 naming the field.
    """
    _check_common(body)
    if body.top_logprobs and not body.logprobs:
        raise invalid("top_logprobs", "needs logprobs to be true")
    if body.continue_final_message:
        raise unsupported("continue_final_message")
    if any(modality != "text" for modality in body.modalities or []):
        raise unsupported("modalities", "other than text are not supported")
    check_messages(body.messages)
    check_template_kwargs(body.chat_template_kwargs)


def check_messages(messages: list[ChatMessage]) -> None:
    """Refuse everything but text.

    Raises:
        ApiError: 400 naming the message and the part.
    """
    for i, message in enumerate(messages):
        _check_unsupported(message, f"messages[{i}].")
        if message.content is None and message.role != "assistant":
            raise invalid(f"messages[{i}].content", "must be text")
        for j, part in enumerate(message.content if isinstance(message.content, list) else []):
            where = f"messages[{i}].content[{j}]"
            if part.type != "text":
                raise unsupported(f"{where}.type", f"{part.type!r} is not supported, only text is")
            if part.text is None:
                raise invalid(f"{where}.text", "the field is missing")


def check_template_kwargs(kwargs: dict[str, Any] | None) -> None:
    """Refuse names that belong to the server.

    Raises:
        ApiError: 400 naming the field.
    """
    for name in RESERVED_TEMPLATE_NAMES.intersection(kwargs or {}):
        raise invalid(f"chat_template_kwargs.{name}", "may not be set here", "not_allowed")


def _check_common(body: SamplingBody) -> None:
    if body.stream_options is not None and not body.stream:
        raise invalid("stream_options", "is allowed only with stream")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "cannot be streamed")
    if body.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "must be -1 or at least 1")
    if body.use_beam_search:
        raise unsupported("use_beam_search")
    if body.response_format is not None and body.response_format.type != "text":
        raise unsupported(
            "response_format", f"of type {body.response_format.type!r} is not supported"
        )
    _check_unsupported(body, "")


def _check_unsupported(struct: msgspec.Struct, prefix: str) -> None:
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, Raw) and bytes(value).strip() not in _HARMLESS:
            raise unsupported(prefix + name)
