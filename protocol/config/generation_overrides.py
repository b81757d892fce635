"""Sampling parameters that an operator sets for requests: `override_generation_config`."""

import msgspec

from protocol.sampling import MaxTokens, MinP, RepetitionPenalty, Temperature, TopK, TopP


class GenerationOverrides(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters of requests that have none; None: the value is not overridden."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    max_new_tokens: MaxTokens | None = None
    """Also a bound for HTTP requests that have a greater one, as in vLLM."""
