"""Request bodies: one struct per route, with the bounds of protocol/sampling.py.

A known field with a wrong type or value is rejected. Fields of features that this server lacks are
listed, too (`api_proc.generation.unsupported_fields`); for others see `api_proc.unknown_fields`.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta

from api_proc.chat.tools import MAX_TOOLS, ToolChoice, Tools, ToolUse, check_tools, resolve_tools
from api_proc.errors import invalid, unsupported
from api_proc.generation import structured
from api_proc.generation.beam_search import LengthPenalty, check_beam_search
from api_proc.generation.messages import Messages, check_chat_prompt, check_continuation
from api_proc.generation.unsupported_fields import Unsupported, reject_unsupported
from protocol import sampling
from protocol.client.ledger import RoutedOptions
from protocol.message import Tenant, TokenId

MAX_PROMPTS = 2048
MAX_TOKENS_PER_PROMPT = 2**21
DEFAULT_COMPLETION_TOKENS = 16

PromptText = Annotated[str, Meta(min_length=1)]
PromptIds = Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_TOKENS_PER_PROMPT)]
PromptItems = Annotated[
    list[PromptText | TokenId | PromptIds], Meta(min_length=1, max_length=MAX_TOKENS_PER_PROMPT)
]
TruncateTokens = Annotated[int, Meta(ge=-1, lt=2**31)]
"""Checked by `check_truncation`, too."""
Timeout = Annotated[float, Meta(gt=0.0, le=86_400.0)]
StreamInterval = Annotated[int, Meta(ge=1, le=2**16)]
ThinkingTokenBudget = Annotated[int, Meta(ge=-1, lt=2**31)]
PatternSize = Annotated[int, Meta(ge=0, le=sampling.MAX_PATTERN_TOKENS)]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class RepetitionDetection(msgspec.Struct, frozen=True):
    """End an output that repeats a pattern of tokens; `max_pattern_size` 0: never."""

    max_pattern_size: PatternSize = 0
    min_pattern_size: PatternSize = 0
    min_count: Annotated[int, Meta(ge=0, le=1000)] = 0

    def resolved(self) -> sampling.RepetitionDetection | None:
        if not self.max_pattern_size:
            return None
        if self.min_count < 2:
            raise invalid("repetition_detection.min_count", "must be at least 2")
        smallest = max(1, self.min_pattern_size)
        return sampling.RepetitionDetection(self.max_pattern_size, smallest, self.min_count)


class SamplingFields(msgspec.Struct, kw_only=True):
    """How tokens are sampled and when a sequence ends. None: the server's default."""

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
    structured_outputs: structured.StructuredOutputs | None = None
    allowed_token_ids: sampling.AllowedTokenIds | None = None
    bad_words: sampling.BadWords | None = None


class CommonBody(SamplingFields, kw_only=True):
    """The fields that completions, chats and responses share. None: the server's default."""

    model: str | None = None
    stream: bool | None = None
    priority: sampling.Priority | None = None
    cache_salt: sampling.CacheSalt | None = None
    user: Tenant | None = None
    timeout: Timeout | None = None
    """Seconds after which the request ends with an error."""
    stream_interval: StreamInterval | None = None
    """Tokens of a sequence in one event of a stream."""


class SamplingBody(CommonBody, kw_only=True):
    """The fields that completions and chats share."""

    n: sampling.NumSequences | None = None
    stream_options: StreamOptions | None = None
    max_tokens: sampling.MaxTokens | None = None
    prompt_logprobs: sampling.NumLogprobs | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: TruncateTokens | None = None
    add_special_tokens: bool | None = None
    response_format: structured.ResponseFormat | None = None
    guided_json: structured.Schema | None = None
    guided_regex: str | None = None
    guided_choice: structured.Choices | None = None
    guided_grammar: str | None = None
    guided_whitespace_pattern: str | None = None
    json_schema: structured.Schema | None = None
    grammar: str | None = None
    logprob_token_ids: sampling.LogprobTokenIds | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: ThinkingTokenBudget | None = None
    """Maximum number of tokens of reasoning, after which its end is forced; -1: no bound."""
    best_of: sampling.NumSequences | None = None
    """Sequences of which the `n` with the highest mean log-probability are returned."""
    return_progress: bool | None = None
    """Whether events of a stream report how much of the prompt is computed."""
    max_completion_tokens: sampling.MaxTokens | None = None
    logits_processors: Unsupported = UNSET
    prompt_embeds: Unsupported = UNSET
    use_beam_search: bool | None = None
    """Whether to search for the `n` best beams, all of which are returned."""
    length_penalty: LengthPenalty | None = None
    early_stopping: bool | None = None

    @property
    def num_sequences(self) -> int:
        """Sequences of each prompt, of which `n` are returned."""
        return max(self.n or 1, self.best_of or 1)

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value."""
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def echoes_prompt(self) -> bool:
        """Whether the first text of a sequence begins with the prompt."""
        return False

    @property
    def is_echo_alone(self) -> bool:
        """Whether the answer is the prompt, without any output."""
        return False

    @property
    def shows_prompt(self) -> bool:
        """Whether the answer contains the text or the ids of the prompt."""
        return self.echoes_prompt or bool(self.return_token_ids)

    @property
    def default_max_tokens(self) -> int | None:
        """The bound where the body has none and they fit; None: as many as fit."""
        return None

    @property
    def request_options(self) -> RoutedOptions:
        """The fields that the scheduler uses; the adapter is found by `model` later."""
        return {
            "priority": self.priority or 0,
            "cache_salt": self.cache_salt or "",
            "tenant": self.user or "",
        }

    @property
    def num_top_logprobs(self) -> int | None:
        """Most likely tokens to describe for each output token; None: no logprobs at all."""
        raise NotImplementedError

    @property
    def num_logprobs(self) -> int | None:
        """Candidates for each output token."""
        if self.num_top_logprobs is None or not self.logprob_token_ids:
            return self.num_top_logprobs
        return len(self.logprob_token_ids)

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Candidates for each prompt token."""
        return self.prompt_logprobs

    def check(self) -> None:
        """Reject contradictory and unsupported fields with a 400 that names the field."""
        if self.stream_options not in (None, StreamOptions()) and not self.stream:
            raise invalid("stream_options", "is allowed only with stream")
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise unsupported("stream_options.include_obfuscation")
        if self.stream and self.prompt_logprobs is not None:
            raise invalid("prompt_logprobs", "cannot be streamed")
        check_truncation(self.truncate_prompt_tokens)
        if self.return_progress and not self.stream:
            raise invalid("return_progress", "is allowed only with stream")
        if self.logprob_token_ids and self.num_top_logprobs is None:
            raise invalid("logprob_token_ids", "needs logprobs")
        self._check_best_of()
        check_beam_search(self)
        reject_unsupported(self, "")

    def _check_best_of(self) -> None:
        num_returned = self.n or 1
        if self.best_of is None or self.best_of == num_returned:
            return
        if self.best_of < num_returned:
            raise invalid("best_of", f"must be at least n, which is {num_returned}")
        if self.stream:
            raise invalid("best_of", "greater than n cannot be streamed")


class CompletionBody(SamplingBody, kw_only=True):
    """Body of POST /v1/completions."""

    prompt: PromptText | PromptItems
    echo: bool | None = None
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None
    """0 only with `echo`: the prompt, and its log-probabilities."""
    logprobs: sampling.NumLogprobs | None = None
    suffix: Unsupported = UNSET
    parse_special: bool | None = None
    """Whether special tokens in the text of the prompt count as such; the default."""

    @property
    def default_max_tokens(self) -> int | None:
        return DEFAULT_COMPLETION_TOKENS

    @property
    def echoes_prompt(self) -> bool:
        return bool(self.echo)

    @property
    def is_echo_alone(self) -> bool:
        return self.output_limit[1] == 0

    def check(self) -> None:
        if self.is_echo_alone and (not self.echo or self.use_beam_search):
            raise invalid("max_tokens", "must be at least 1; 0 needs echo, without use_beam_search")
        if self.is_echo_alone and self.min_tokens:
            name = self.output_limit[0]
            raise invalid("min_tokens", f"{self.min_tokens} is greater than {name} 0")
        super().check()

    @property
    def num_top_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        wanted = (self.prompt_logprobs, self.logprobs if self.echo else None)
        return max((count for count in wanted if count is not None), default=None)


class ChatBody(SamplingBody, kw_only=True):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: sampling.NumLogprobs | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Unsupported = UNSET
    continue_final_message: bool | None = None
    documents: Unsupported = UNSET
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    functions: Unsupported = UNSET
    function_call: Unsupported = UNSET
    modalities: list[str] | None = None
    audio: Unsupported = UNSET
    prediction: Unsupported = UNSET
    web_search_options: Unsupported = UNSET
    moderation: Unsupported = UNSET

    @property
    def num_top_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools that the model may call."""
        return resolve_tools(self.tools, self.tool_choice, self.parallel_tool_calls)

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables of the chat template; templates have two names for thinking."""
        variables: dict[str, Any] = {}
        is_thinking = self.enable_thinking
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
            if is_thinking is None:
                is_thinking = self.reasoning_effort != "none"
        if is_thinking is not None:
            variables |= {"enable_thinking": is_thinking, "thinking": is_thinking}
        return variables | (self.chat_template_kwargs or {})

    def check(self) -> None:
        super().check()
        check_tools(self.tools or [])
        resolve_tools(self.tools, self.tool_choice, self.parallel_tool_calls)
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs", "needs logprobs to be true")
        if any(modality != "text" for modality in self.modalities or []):
            raise unsupported("modalities", "other than text are not supported")
        check_chat_prompt(self.messages, self.chat_template_kwargs)
        check_continuation(
            self.messages, self.add_generation_prompt, bool(self.continue_final_message)
        )


class TokenizeBody(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    add_special_tokens: bool | None = None
    parse_special: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Unsupported = UNSET
    documents: Unsupported = UNSET


class TemplateBody(msgspec.Struct, kw_only=True):
    """Body of POST /apply-template: what a chat's prompt is made of."""

    messages: Messages
    model: str | None = None
    tools: Annotated[list[dict[str, Any]], Meta(max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: Unsupported = UNSET
    documents: Unsupported = UNSET


class DetokenizeBody(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: Annotated[list[TokenId], Meta(max_length=MAX_TOKENS_PER_PROMPT)]
    model: str | None = None


def check_truncation(num_tokens: int | None) -> None:
    """Raise a 400 for a `truncate_prompt_tokens` that would keep nothing."""
    if num_tokens == 0:
        raise invalid("truncate_prompt_tokens", "must be -1 or at least 1")


def wants_generation_prompt(body: ChatBody | TokenizeBody | TemplateBody) -> bool:
    """Return whether the prompt ends with the beginning of the model's message, as by default."""
    return body.add_generation_prompt is not False and not body.continue_final_message
