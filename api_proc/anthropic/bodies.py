"""Request bodies of /v1/messages and /v1/messages/count_tokens."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta

from api_proc.anthropic.blocks import InputBlock, TextBlock
from api_proc.chat.tools import MAX_TOOLS, ToolName
from api_proc.generation.messages import MAX_MESSAGES
from api_proc.generation.unsupported_fields import Unsupported
from protocol import sampling

MAX_USER_ID_CHARS = 1024

CacheControl = dict[str, Any] | None
"""Accepted without effect: every prefix is cached anyway."""


class InputMessage(msgspec.Struct, frozen=True):
    """One turn; the role system may occur in between."""

    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class ClientTool(msgspec.Struct, frozen=True):
    """A tool that the client runs. Tools of Anthropic's own servers have other types."""

    name: ToolName
    type: str | None = None
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: CacheControl = None
    eager_input_streaming: bool | None = None
    """Without effect: arguments are always streamed as they are generated."""
    defer_loading: Unsupported = UNSET
    input_examples: Unsupported = UNSET
    allowed_callers: list[Literal["direct"]] | None = None


class ToolChoice(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the model reasons; adaptive: as its chat template has it by default."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: sampling.MaxTokens | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The schema that the text of the answer follows."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormat | None = None


class ContextEdit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Only the edit that changes nothing: chat templates decide on earlier reasoning."""

    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"]


class ContextManagement(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    edits: list[ContextEdit] | None = None


class PromptBody(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens: what a prompt is made of."""

    model: str | None = None
    messages: Annotated[list[InputMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ClientTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """The older name of `output_config.format`."""
    cache_control: CacheControl = None
    context_management: ContextManagement | None = None
    speed: Literal["standard"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """vLLM's field: variables of the chat template, after those that `thinking` sets."""
    mcp_servers: Unsupported = UNSET


class Metadata(msgspec.Struct, frozen=True):
    user_id: Annotated[str, Meta(max_length=MAX_USER_ID_CHARS)] | None = None
    """Names the tenant."""


class MessagesBody(PromptBody, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: sampling.MaxTokens
    stop_sequences: sampling.StopStrings | None = None
    stream: bool | None = None
    temperature: sampling.Temperature | None = None
    top_p: sampling.TopP | None = None
    top_k: sampling.TopK | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    cache_salt: sampling.CacheSalt | None = None
    """vLLM's field: separates the cached prefixes of its users."""
    container: Unsupported = UNSET
    inference_geo: Unsupported = UNSET
