"""Sampling parameters as a Python program writes them: vLLM's names and defaults."""

import enum
import typing
from collections.abc import Mapping
from typing import Any

import msgspec

from api_proc.bodies import RepetitionDetection, ThinkingTokenBudget
from api_proc.errors import ApiError
from api_proc.generation.structured import StructuredOutputs, grammar_of_outputs
from api_proc.params import as_bad_words, bad_word_ids, nth_seed, room_for_output
from api_proc.text.checkpoint import SamplingDefaults
from api_proc.text.tokenizer import TextTokenizer
from protocol import sampling
from protocol.config.field_errors import read_field_error
from protocol.model_facts import ModelFacts


class RequestOutputKind(enum.Enum):
    """What each output of a stream contains."""

    CUMULATIVE = 0
    """Everything generated so far."""
    DELTA = 1
    """What is new since the last output."""
    FINAL_ONLY = 2
    """Everything, in one output at the end."""


class SamplingParams(msgspec.Struct):
    """How the tokens of one request are chosen; ValueError names a field that is out of bounds."""

    n: sampling.NumSequences = 1
    presence_penalty: sampling.Penalty = 0.0
    frequency_penalty: sampling.Penalty = 0.0
    repetition_penalty: sampling.RepetitionPenalty = 1.0
    temperature: sampling.Temperature = 1.0
    top_p: sampling.TopP = 1.0
    top_k: sampling.TopK = 0
    """0 or -1: off."""
    min_p: sampling.MinP = 0.0
    seed: sampling.Seed | None = None
    """None: drawn for each prompt from the seed of the `LLM`."""
    stop: sampling.StopString | sampling.StopStrings | None = None
    stop_token_ids: sampling.StopTokenIds | None = None
    ignore_eos: bool = False
    max_tokens: sampling.MaxTokens | None = 16
    """None: as many as fit."""
    min_tokens: sampling.MinTokens = 0
    logprobs: sampling.NumLogprobs | None = None
    """Candidates per output token, besides the token itself."""
    prompt_logprobs: sampling.NumLogprobs | None = None
    detokenize: bool = True
    """Whether outputs have text; without it, stop strings are not possible."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: sampling.LogitBias | None = None
    bad_words: sampling.BadWords | None = None
    """Texts that the output never contains."""
    allowed_token_ids: sampling.AllowedTokenIds | None = None
    logprob_token_ids: sampling.LogprobTokenIds | None = None
    """Where `logprobs` is set: the candidates to describe, instead of the most likely ones."""
    structured_outputs: StructuredOutputs | None = None
    """A constraint for the whole output; a dictionary with its fields is accepted too."""
    repetition_detection: RepetitionDetection | None = None
    """Ends an output that repeats a pattern; a dictionary with its fields is accepted too."""
    thinking_token_budget: ThinkingTokenBudget | None = None
    """Tokens of reasoning, after which its end is forced; None or -1: no bound."""

    def __post_init__(self) -> None:
        convert_fields(self, _HINTS)
        try:
            self.grammar()
            self.detection()
        except ApiError as error:
            raise ValueError(error.message) from None
        if self.stop and not self.detokenize:
            raise ValueError("stop: stop strings need detokenize")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: {self.min_tokens} is greater than max_tokens {self.max_tokens}"
            )

    def grammar(self) -> sampling.Grammar | None:
        """Return the constraint as the engine takes it."""
        outputs = self.structured_outputs
        return None if outputs is None else grammar_of_outputs(outputs)

    def detection(self) -> sampling.RepetitionDetection | None:
        """Return the repetition detection as the engine takes it."""
        return None if self.repetition_detection is None else self.repetition_detection.resolved()

    @property
    def stop_strings(self) -> list[str]:
        if self.stop is None:
            return []
        return [self.stop] if isinstance(self.stop, str) else self.stop


def convert_fields(params: msgspec.Struct, hints: Mapping[str, Any]) -> None:
    """Make the fields of a struct what their types demand; ValueError names a field that is not."""
    for name, hint in hints.items():
        value = getattr(params, name)
        try:
            setattr(params, name, msgspec.convert(value, hint))
        except msgspec.ValidationError as error:
            raise ValueError(read_field_error(str(error), repr(value)).about(name)) from None


_HINTS = typing.get_type_hints(SamplingParams, include_extras=True)
del _HINTS["output_kind"]


def with_defaults(defaults: SamplingDefaults) -> SamplingParams:
    """Return the parameters of a prompt without any: those of the checkpoint."""
    values = msgspec.structs.asdict(defaults)
    del values["suppress_tokens"]  # `resolved` bans them, whatever the parameters
    del values["max_tokens_limit"]  # it is for requests of others
    max_tokens = values.pop("max_new_tokens")
    return SamplingParams(**values, **({} if max_tokens is None else {"max_tokens": max_tokens}))


def resolved(
    params: SamplingParams,
    facts: ModelFacts,
    tokenizer: TextTokenizer,
    num_prompt_tokens: int,
    *,
    defaults: SamplingDefaults,
    seed: int,
    index: int,
    budget: sampling.ThinkingBudget | None = None,
) -> sampling.SamplingParams:
    """Return the parameters of one sequence for the engine; `seed` where `params` has none."""
    max_tokens = params.max_tokens
    suppressed = defaults.suppressed(facts.vocab_size, params.allowed_token_ids)
    if max_tokens is None:
        max_tokens = max(1, room_for_output(facts, num_prompt_tokens))
    return sampling.SamplingParams(
        max_tokens=max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=nth_seed(seed if params.seed is None else params.seed, index),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        stop_token_ids=params.stop_token_ids or [],
        logit_bias=params.logit_bias or {},
        logprobs=params.logprobs,
        prompt_logprobs=None if index else params.prompt_logprobs,  # the prompt is the same
        allowed_token_ids=params.allowed_token_ids,
        bad_words=[*bad_word_ids(params.bad_words or [], tokenizer), *as_bad_words(suppressed)],
        logprob_token_ids=params.logprob_token_ids or [],
        grammar=params.grammar(),
        repetition_detection=params.detection(),
        thinking_budget=budget,
    )
