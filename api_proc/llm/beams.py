"""Beam search for Python programs, with the names of vLLM's classes."""

import typing
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from api_proc.generation.beam_search import LengthPenalty, too_many_beams
from api_proc.llm.outputs import Logprob, candidates
from api_proc.llm.prompts import invalid
from api_proc.llm.sampling import convert_fields
from api_proc.params import room_for_output
from api_proc.text.beam_search import MAX_BEAM_WIDTH, Beam, BeamSearchOptions
from api_proc.text.output_sequence import Prompt
from api_proc.text.tokenizer import TextTokenizer
from protocol import sampling
from protocol.model_facts import ModelFacts


class BeamSearchParams(msgspec.Struct):
    """What to search for; ValueError names a field that is out of its bounds."""

    beam_width: Annotated[int, Meta(ge=1, le=MAX_BEAM_WIDTH)]
    max_tokens: sampling.MaxTokens
    ignore_eos: bool = False
    temperature: sampling.Temperature = 0.0
    """0 or 1, without effect: beams are compared by the log-probabilities of the model."""
    length_penalty: LengthPenalty = 1.0
    """Exponent of the length by which a sum of log-probabilities is divided."""
    early_stopping: bool = False
    """Stop at `beam_width` beams that have ended; else continue until none can get better."""

    def __post_init__(self) -> None:
        convert_fields(self, _HINTS)
        if self.temperature not in (0.0, 1.0):
            raise ValueError(f"temperature: must be 0 or 1; got {self.temperature}")

    def check(self, suppressed_token_ids: list[int]) -> None:
        """Raise InvalidRequest if a checkpoint that suppresses these tokens permits fewer beams."""
        reason = too_many_beams(self.beam_width, len(set(suppressed_token_ids)))
        if reason is not None:
            raise invalid("beam_width", reason)

    def options(
        self, facts: ModelFacts, num_prompt_tokens: int, suppressed_token_ids: list[int]
    ) -> BeamSearchOptions:
        """Return the options of a search after a prompt; it ends where the context is full."""
        return BeamSearchOptions(
            beam_width=self.beam_width,
            max_tokens=min(self.max_tokens, max(1, room_for_output(facts, num_prompt_tokens))),
            eos_token_ids=frozenset() if self.ignore_eos else frozenset(facts.eos_token_ids),
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            suppressed_token_ids=frozenset(suppressed_token_ids),
        )


_HINTS = typing.get_type_hints(BeamSearchParams, include_extras=True)


@dataclass
class BeamSearchSequence:
    """One beam."""

    tokens: list[int]
    """The prompt and the output."""
    logprobs: list[dict[int, Logprob]]
    """Log-probability of each token of the output."""
    cum_logprob: float
    text: str
    """The text of the prompt and the output."""
    finish_reason: str | None
    """stop or length."""
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def sequence_of(beam: Beam, prompt: Prompt, tokenizer: TextTokenizer) -> BeamSearchSequence:
    tokens = prompt.token_ids + beam.token_ids
    return BeamSearchSequence(
        tokens,
        [candidates(tokenizer, entry) for entry in beam.logprobs],
        beam.cumulative_logprob,
        tokenizer.decode(tokens, skip_special_tokens=True),
        None if beam.finish_reason is None else str(beam.finish_reason),
        beam.stop_token_id,
    )
