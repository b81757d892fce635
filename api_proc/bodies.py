"""Request bodies: one struct per route, with the bounds of protocol/sampling.py.

Unknown fields are ignored, because OpenAI's own clients send some; a known field with a wrong type
or value is rejected. Fields of features that this server lacks are listed, so that a request for
one of them fails instead of getting a different answer without notice.
"""

from typing import Annotated, Any, ClassVar, Literal, TypedDict

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from api_proc.errors import invalid, unsupported
from protocol import sampling
from protocol.api_core import Tenant
from protocol.message import TokenId

MAX_PROMPTS = 2048
MAX_MESSAGES = 4096
MAX_TOKENS_PER_PROMPT = 2**21
DEFAULT_COMPLETION_TOKENS = 16

PromptText = Annotated[str, Meta(min_length=1)]
PromptIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS_PER_PROMPT)]
PromptItems = Annotated[
    list[PromptText | TokenId | PromptIds], Meta(min_length=1, max_length=MAX_TOKENS_PER_PROMPT)
]
TruncateTokens = Annotated[int, Meta(ge=-1, lt=2**31)]
Unsupported = Raw | UnsetType


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """`response_format`; only text is supported."""

    type: str


class RequestOptions(TypedDict):
    """Keyword arguments of the engine client's `submit`."""

    priority: int
    cache_salt: str
    tenant: str


class SamplingBody(msgspec.Struct, kw_only=True):
    """The fields that completions and chat share. None: the server's default."""

    default_max_tokens: ClassVar[int | None] = None
    """Without a bound in the body; None: as many as fit."""

    model: str | None = None
    n: sampling.NumSequences | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: sampling.MaxTokens | None = None
    temperature: sampling.Temperature | None = None
    top_p: sampling.TopP | None = None
    top_k: sampling.TopK | None = None
    min_p: sampling.MinP | None = None
    seed: sampling.Seed | None = None
    presence_penalty: sampling.Penalty | None = None
    frequency_penalty: sampling.Penalty | None = None
    repetition_penalty: sampling.RepetitionPenalty | None = None
    logit_bias: sampling.LogitBias | None = None
    stop: sampling.StopString | sampling.StopStrings | None = None
    stop_token_ids: sampling.StopTokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: sampling.MinTokens | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: sampling.NumLogprobs | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: TruncateTokens | None = None
    add_special_tokens: bool | None = None
    priority: sampling.Priority | None = None
    cache_salt: sampling.CacheSalt | None = None
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
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def request_options(self) -> RequestOptions:
        """The fields that the scheduler uses."""
        return {
            "priority": self.priority or 0,
            "cache_salt": self.cache_salt or "",
            "tenant": self.user or "",
        }

    @property
    def num_logprobs(self) -> int | None:
        """Candidates for each output token."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Candidates for each prompt token."""
        return self.prompt_logprobs

    def check(self) -> None:
        """Reject contradictory and unsupported fields with a 400 that names the field."""
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "is allowed only with stream")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "cannot be streamed")
        if self.truncate_prompt_tokens == 0:
            raise invalid("truncate_prompt_tokens", "must be -1 or at least 1")
        if self.use_beam_search:
            raise unsupported("use_beam_search")
        if self.response_format is not None and self.response_format.type != "text":
            kind = self.response_format.type
            raise unsupported("response_format", f"of type {kind!r} is not supported")
        _reject_unsupported(self, "")


class CompletionBody(SamplingBody, kw_only=True):
    """Body of POST /v1/completions."""

    default_max_tokens: ClassVar[int | None] = DEFAULT_COMPLETION_TOKENS

    prompt: PromptText | PromptItems
    best_of: Annotated[int, Meta(ge=1)] | None = None
    echo: bool | None = None
    logprobs: sampling.NumLogprobs | None = None
    suffix: Unsupported = UNSET
    prompt_embeds: Unsupported = UNSET

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in wanted if count is not None), default=None)

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise invalid("best_of", f"must be equal to n, which is {self.n or 1}")


class ContentPart(msgspec.Struct, frozen=True):
    """One part of a message's content; only text is supported."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    tool_calls: Unsupported = UNSET
    function_call: Unsupported = UNSET

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates expect it: text in one piece, no absent fields."""
        content = self.content
        if isinstance(content, list):
            content = "\n".join([part.text or "" for part in content])
        role = "system" if self.role == "developer" else self.role
        result = {"role": role, "content": content or ""}
        for name in ("name", "tool_call_id", "reasoning_content"):
            value = getattr(self, name)
            if value is not None:
                result[name] = value
        return result


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]


class ChatBody(SamplingBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: sampling.MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: sampling.NumLogprobs | None = None
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

    @property
    def output_limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is None:
            return super().output_limit
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs to be true")
        if self.continue_final_message:
            raise unsupported("continue_final_message")
        if any(modality != "text" for modality in self.modalities or []):
            raise unsupported("modalities", "other than text are not supported")
        check_chat_prompt(self.messages, self.chat_template_kwargs)


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


_RESERVED_TEMPLATE_NAMES = frozenset(
    {"messages", "tools", "documents", "tokenize", "chat_template", "add_generation_prompt"}
)
_NO_EFFECT = frozenset({b"null", b"[]", b"{}", b'""', b"false", b'"none"', b'"auto"'})


def check_chat_prompt(messages: list[ChatMessage], kwargs: dict[str, Any] | None) -> None:
    """Reject content other than text, and template variables that the server sets."""
    for i, message in enumerate(messages):
        _reject_unsupported(message, f"messages[{i}].")
        if message.content is None and message.role != "assistant":
            raise invalid(f"messages[{i}].content", "must be text")
        for j, part in enumerate(message.content if isinstance(message.content, list) else []):
            where = f"messages[{i}].content[{j}]"
            if part.type != "text":
                raise unsupported(f"{where}.type", f"{part.type!r} is not supported, only text is")
            if part.text is None:
                raise invalid(f"{where}.text", "the field is missing")
    for name in _RESERVED_TEMPLATE_NAMES.intersection(kwargs or {}):
        raise invalid(f"chat_template_kwargs.{name}", "is set by the server", "not_allowed")


def _reject_unsupported(struct: msgspec.Struct, prefix: str) -> None:
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, Raw) and bytes(value).strip() not in _NO_EFFECT:
            raise unsupported(prefix + name)
