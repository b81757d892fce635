"""Finds the part of a checkpoint's model that computes text, and its class in transformers.

For a vision-language model, this is the language model: towers and projectors, which text never
reaches, are not built, and their weights are not read (unbuilt_parts.py).
"""

from typing import Any

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PretrainedConfig
from transformers.models.auto.modeling_auto import AutoModelForMultimodalLM

from worker_proc.loading.model_kind import ModelKind, headless_class, model_kind

_THINKER = "thinker"
"""The part of an omni checkpoint that writes text; others speak (Qwen2.5-Omni, Qwen3-Omni)."""
_IS_PART = "is_part_for_texts"
"""An attribute of the configuration of such a part."""


def part_for_texts(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of the part of a checkpoint that writes text; usually all of it."""
    part: PretrainedConfig | None = getattr(config, f"{_THINKER}_config", None)
    if part is None or type(part) not in AutoModelForMultimodalLM._model_mapping:
        return config
    part.dtype = part.dtype or config.dtype
    setattr(part, _IS_PART, True)
    return part


def is_of_other_part(key: str, config: PretrainedConfig) -> bool:
    """Return whether a checkpoint's tensor belongs to a part that does not write text."""
    return hasattr(config, _IS_PART) and not key.startswith(f"{_THINKER}.")


def auto_class(config: PretrainedConfig) -> Any:
    """Return the auto class of transformers that finds the model for a configuration.

    A configuration with both a causal and a multimodal model gets the causal one, if its text part
    has a causal model by itself. Some decoders that take sound are only in the list of models with
    an encoder.
    """
    kind = model_kind(config)
    if kind is not ModelKind.GENERATES:
        return headless_class(config, kind)
    is_multimodal = type(config) in AutoModelForMultimodalLM._model_mapping
    of_texts = (config, config.get_text_config(decoder=True))
    is_causal = all(type(one) in AutoModelForCausalLM._model_mapping for one in of_texts)
    if is_multimodal and not is_causal:
        return AutoModelForMultimodalLM
    in_another_list = type(config) in AutoModelForSeq2SeqLM._model_mapping
    is_alone = in_another_list and type(config) not in AutoModelForCausalLM._model_mapping
    return AutoModelForSeq2SeqLM if is_alone else AutoModelForCausalLM
