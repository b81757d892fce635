"""POST /inference/v1/generate: vLLM's route for clients with a tokenizer, tokens in, tokens out.

A body is translated into that of a completion, whose path it takes. Errors are translated back.
"""

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from api_proc.bodies import (
    CompletionBody,
    PromptIds,
    RepetitionDetection,
    SamplingFields,
    StreamInterval,
    StreamOptions,
    ThinkingTokenBudget,
    Timeout,
    TruncateTokens,
)
from api_proc.errors import ApiError
from api_proc.generation.serving import GenerationApi
from api_proc.generation.unsupported_fields import Unsupported, reject_unsupported
from api_proc.http.json_body import BodyDecoder, Turn
from api_proc.openai.completions import COMPLETIONS
from api_proc.openai.encoded_list import EncodedLists
from api_proc.openai.logprobs import chat_logprobs, prompt_logprobs, token_text_of
from api_proc.openai.objects import ChatLogprobs, PromptLogprobList, Usage
from api_proc.openai.reply import chunk_answers
from api_proc.text.output_sequence import Delta, OutputSequence, Prompt
from api_proc.text.tokenizer import TextTokenizer
from protocol import sampling
from protocol.message import Tenant

PATH = "/inference/v1/generate"


class GenerateParams(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `SamplingParams` in a body of /inference/v1/generate. None: the server's default."""

    n: sampling.NumSequences | None = None
    max_tokens: sampling.MaxTokens | None = None
    skip_special_tokens: bool | None = None
    """Whether `stop` is searched for in the text without special tokens, as by default."""
    logprobs: sampling.NumLogprobs | None = None
    prompt_logprobs: sampling.NumLogprobs | None = None
    logprob_token_ids: sampling.LogprobTokenIds | None = None
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: ThinkingTokenBudget | None = None
    truncate_prompt_tokens: TruncateTokens | None = None
    extra_args: Unsupported = UNSET
    # These have no effect: they concern text, of which the answer has none, or vLLM's processes.
    spaces_between_special_tokens: bool | None = None
    detokenize: bool | None = None
    flat_logprobs: bool | None = None
    output_kind: int | None = None


class GenerateBody(msgspec.Struct, kw_only=True):
    """Body of POST /inference/v1/generate."""

    token_ids: PromptIds
    sampling_params: GenerateParams
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: StreamInterval | None = None
    cache_salt: sampling.CacheSalt | None = None
    priority: sampling.Priority | None = None
    user: Tenant | None = None
    timeout: Timeout | None = None
    features: Unsupported = UNSET
    output_mode: Literal["tokens"] | None = None
    reasoning_ended: Unsupported = UNSET
    reasoning_parser_kwargs: Unsupported = UNSET


class TokensCompletion(CompletionBody, kw_only=True):
    """The completion that a body stands for."""

    @property
    def shows_prompt(self) -> bool:
        return False

    @property
    def default_max_tokens(self) -> int | None:
        return None


_COPIED = frozenset(GenerateBody.__struct_fields__) & frozenset(CompletionBody.__struct_fields__)
_PARAMS = frozenset(GenerateParams.__struct_fields__) & frozenset(CompletionBody.__struct_fields__)
_PARAM = re.compile(rf"({'|'.join(sorted(_PARAMS, key=len, reverse=True))})\b")


def completion_of(body: GenerateBody) -> TokensCompletion:
    """Return the completion that a body stands for; ApiError: it has a field without support."""
    reject_unsupported(body, "")
    params = body.sampling_params
    reject_unsupported(params, "sampling_params.")
    return TokensCompletion(
        prompt=[*body.token_ids],
        return_token_ids=True,
        **{name: getattr(body, name) for name in _COPIED},
        **{name: getattr(params, name) for name in _PARAMS},
    )


class _Decoder:
    """Decodes bodies, and translates them."""

    def __init__(self) -> None:
        self._decoder = BodyDecoder(GenerateBody)

    def __call__(self, raw: bytes) -> TokensCompletion:
        return completion_of(self._decoder(raw))

    async def in_slices(self, raw: bytes, turn: Turn) -> tuple[TokensCompletion, list[str]]:
        body, unknown = await self._decoder.in_slices(raw, turn)
        return completion_of(body), unknown


class GeneratedChoice(msgspec.Struct, kw_only=True):
    """A sequence, or a part of one; names of tokens in `logprobs` are `token_id:ID`."""

    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int]
    resumed_inexactly: bool | UnsetType = UNSET
    """True if one engine's output was continued by another with different facts."""


class Generated(msgspec.Struct, kw_only=True, rename={"id": "request_id"}):
    """Response of /inference/v1/generate, or one chunk of it."""

    id: str
    created: int
    model: str
    choices: list[GeneratedChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_logprobs: PromptLogprobList | UnsetType = UNSET


@dataclass(frozen=True)
class GenerateFormat:
    """Chunks of token ids."""

    plain_choice: ClassVar = (b"", b"")  # a chunk always has ids, so none is text alone

    tokenizer: TextTokenizer
    body: TokensCompletion
    prompts: list[Prompt]
    head: Generated
    lists: EncodedLists = field(default_factory=EncodedLists)

    def opening(self, sequence: OutputSequence) -> dict[str, Any] | None:
        return None

    def choice(self, sequence: OutputSequence, delta: Delta, *, is_first: bool) -> GeneratedChoice:
        choice = GeneratedChoice(
            index=sequence.index,
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
            token_ids=delta.token_ids,
        )
        num_top = self.body.num_logprobs
        if num_top is not None and delta.logprobs is not None:
            text_of = token_text_of(self.tokenizer, as_ids=True)
            choice.logprobs = chat_logprobs(
                self.tokenizer, delta.logprobs, num_top, self.lists, text_of
            )
        if delta.finish_reason is not None and sequence.stream.resumed_inexactly:
            choice.resumed_inexactly = True
        return choice

    def whole(self, first: OutputSequence, usage: Usage) -> Generated:
        generated = msgspec.structs.replace(self.head, usage=usage)
        if (num_top := self.body.prompt_logprobs) is not None:
            entries = first.prompt_logprobs
            generated.prompt_logprobs = prompt_logprobs(
                self.tokenizer, entries, num_top, self.lists
            )
        return generated

    def whole_choice(self, sequence: OutputSequence, delta: Delta) -> GeneratedChoice:
        return self.choice(sequence, delta, is_first=True)


def _renamed(error: ApiError) -> ApiError:
    """Return an error of the route of completions with the names of this route."""
    param = error.param
    if param is None:
        return error
    new = param
    if re.match(r"prompt(?!_)", param):
        new = param.replace("prompt", "token_ids", 1)
    elif _PARAM.match(param):
        new = f"sampling_params.{param}"
    message = error.message
    if message.startswith(param):
        message = new + message[len(param) :]
    return ApiError(error.status, message, param=new, code=error.code, headers=error.headers)


GENERATE: GenerationApi[TokensCompletion] = GenerationApi(
    path=PATH,
    decode=_Decoder(),
    prompt_param="token_ids",
    tokenize=COMPLETIONS.tokenize,
    restore_prompts=COMPLETIONS.restore_prompts,
    make_answer=chunk_answers(GenerateFormat, "", Generated),
    shown_error=_renamed,
)
