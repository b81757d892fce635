"""The longest context that a model can compute, by its configuration.

Lengths are vLLM's where transformers' frequencies do not depend on the lengths of texts: YaRN and
linear scaling extend the context by their factor.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PretrainedConfig

from worker_proc.errors import UnsupportedModel

UNBOUNDED_MODEL_LEN = 2**20
"""Of a model without attention whose configuration bounds no positions."""
UNSTATED_MODEL_LEN = 2048
"""Of a model with attention whose configuration bounds no positions, as in vLLM."""
_KEY = "max_position_embeddings"
_OTHER_KEYS = ("max_seq_len", "seq_length")
"""Keys of models without angles or embeddings of positions (MPT, Bloom)."""
_ORIGINAL = "original_max_position_embeddings"
_log = logging.getLogger(__name__)


def context_length(text_config: PretrainedConfig, *, has_attention: bool) -> int:
    """Return the greatest number of tokens of a text."""
    keys = (_KEY, *_OTHER_KEYS)
    stated = next(filter(None, (getattr(text_config, key, None) for key in keys)), None)
    if stated is None and not has_attention:
        return UNBOUNDED_MODEL_LEN
    if stated is None:
        _log.info("config.json bounds no positions; the context is %d tokens", UNSTATED_MODEL_LEN)
        return UNSTATED_MODEL_LEN
    length = min(_scaled_lengths(text_config, int(stated)))
    if length < stated:
        _log.info(
            "the context is cut from %d (%s) to %d tokens: longrope computes all positions of a"
            " longer text with other frequencies",
            stated,
            _KEY,
            length,
        )
    return length


def check_frequencies(text_config: PretrainedConfig) -> None:
    """Raise UnsupportedModel for frequencies that depend on the other texts of a step."""
    if any(parameters.get("rope_type") == "dynamic" for parameters in _rotary(text_config)):
        raise UnsupportedModel(
            f"{text_config.model_type}: rope_type is dynamic, whose frequencies depend on the"
            " longest text of a step; yarn and linear scaling are supported"
        )


def _rotary(text_config: PretrainedConfig) -> list[Mapping[str, Any]]:
    """Return the parameters of each rotary embedding, of which layers may have their own."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    return [value for value in rope.values() if isinstance(value, Mapping)] or [rope]


def _scaled_lengths(text_config: PretrainedConfig, stated: int) -> Iterator[int]:
    """Yield the length that each rotary embedding of the model allows."""
    rotary = _rotary(text_config)
    is_nested = bool(rotary[0]) and rotary[0] is not text_config.rope_parameters
    for parameters in rotary:
        yield _scaled_length(parameters, stated, is_nested=is_nested)


def _scaled_length(parameters: Mapping[str, Any], stated: int, *, is_nested: bool) -> int:
    kind, factor = parameters.get("rope_type"), parameters.get("factor") or 1.0
    original = parameters.get(_ORIGINAL) or stated
    if kind == "longrope":
        # Past this length every request of a step would use other frequencies.
        return min(stated, int(original))
    if kind == "yarn":
        return max(stated, int(original * factor))
    if kind == "linear" and not is_nested:  # Gemma-3 states the scaled length
        return int(stated * factor)
    return stated
