"""The longest context that a model can compute, according to its configuration.

Lengths are the same as in vLLM: YaRN, linear scaling and dynamic NTK extend the context by their
factor; LongRoPE extends it if the engine requests more than the original context.
"""

import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from transformers import DynamicCache, PretrainedConfig

from worker_proc.kv.kv_groups import LayerSpec

UNBOUNDED_MODEL_LEN = 2**20
"""The context of a model without attention whose configuration does not bound positions."""
UNSTATED_MODEL_LEN = 2048
"""The context of a model with attention whose configuration does not bound positions, as in
vLLM."""
_KEY = "max_position_embeddings"
_OTHER_KEYS = ("max_seq_len", "seq_length")
"""Keys of models without rotary or position embeddings (MPT, Bloom)."""
_ORIGINAL = "original_max_position_embeddings"
_log = logging.getLogger("troika.worker")


def context_length(
    text_config: PretrainedConfig, *, has_attention: bool, max_model_len: int | None = None
) -> int:
    """Return the greatest number of tokens in a text; `max_model_len` is the engine's setting.

    With LongRoPE, the result decides which factors all texts use (frequencies.py).
    """
    length = stated_length(text_config, max_model_len)
    if length is None and not has_attention:
        return UNBOUNDED_MODEL_LEN
    if length is None:
        _log.info("config.json bounds no positions; the context is %d tokens", UNSTATED_MODEL_LEN)
        return UNSTATED_MODEL_LEN
    stated = _stated_positions(text_config)
    if stated is not None and length < stated:
        _log.info(
            "the context is %d tokens, with the short factors of longrope; --max-model-len serves"
            " up to %d (%s), with the long factors for all texts",
            length,
            stated,
            _KEY,
        )
    return length


def stated_length(text_config: PretrainedConfig, max_model_len: int | None) -> int | None:
    """Return the most tokens that config.json allows in a text; None: there is no bound."""
    stated = _stated_positions(text_config)
    if stated is None:
        return None
    return min(_scaled_lengths(text_config, stated, max_model_len or 0))


def cached_length(config: PretrainedConfig, layers: Collection[LayerSpec]) -> int | None:
    """Return the longest text that transformers computes alike with and without a cache.

    None: any length. A cache drops tokens that the sliding windows of config.json have passed. If
    attention has no such window (Moshi), results for longer texts depend on how they are chunked.
    The model's code must have been imported: it may register types of cache layers (DeepSeek-V4).
    """
    known = {spec.compressed.window if spec.compressed else spec.window for spec in layers}
    cached = (
        getattr(layer, "sliding_window", None) for layer in DynamicCache(config=config).layers
    )
    lengths = [int(window) for window in cached if window is not None and window not in known]
    return min(lengths, default=None)


def length_key(text_config: PretrainedConfig) -> str | None:
    """Return the key of config.json that bounds positions, or None."""
    keys = (_KEY, *_OTHER_KEYS)
    return next((key for key in keys if getattr(text_config, key, None)), None)


def _stated_positions(text_config: PretrainedConfig) -> int | None:
    key = length_key(text_config)
    return None if key is None else int(getattr(text_config, key))


def _rotary(text_config: PretrainedConfig) -> list[Mapping[str, Any]]:
    """Return the parameters of each rotary embedding; types of layers may have separate ones."""
    rope = getattr(text_config, "rope_parameters", None) or {}
    return [value for value in rope.values() if isinstance(value, Mapping)] or [rope]


def _scaled_lengths(text_config: PretrainedConfig, stated: int, asked: int) -> Iterator[int]:
    """Yield the length that each rotary embedding of the model allows."""
    rotary = _rotary(text_config)
    is_nested = bool(rotary[0]) and rotary[0] is not text_config.rope_parameters
    for parameters in rotary:
        yield _scaled_length(parameters, stated, asked, is_nested=is_nested)


def _scaled_length(
    parameters: Mapping[str, Any], stated: int, asked: int, *, is_nested: bool
) -> int:
    kind, factor = parameters.get("rope_type"), parameters.get("factor") or 1.0
    original = parameters.get(_ORIGINAL) or stated
    if kind == "longrope":  # its long factors are worse for short texts
        return stated if asked > int(original) else min(stated, int(original))
    if kind == "dynamic" and not parameters.get("alpha"):  # `alpha` is a fixed stretch of the base
        return max(stated, int(stated * factor))
    if kind == "yarn":
        return max(stated, int(original * factor))
    if kind == "linear" and not is_nested:  # Gemma-3 states the scaled length
        return int(stated * factor)
    return stated
