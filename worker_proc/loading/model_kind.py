"""The kind of a checkpoint: it generates tokens, embeds a text, or scores its labels."""

import enum
from pathlib import Path
from typing import Any

from transformers import AutoModel, AutoModelForSequenceClassification, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from protocol.config import ConfigError
from protocol.config.sentence_modules import SentenceModules, read_sentence_modules
from worker_proc.errors import CheckpointError, UnsupportedModel

_CLASSIFIER = "ForSequenceClassification"
_HEADS_OF_ENCODERS = ("ForMaskedLM", "ForPreTraining")
"""Heads that guess hidden tokens; the vectors are their inputs."""


class ModelKind(enum.StrEnum):
    """The kind of transformers class that computes a checkpoint."""

    GENERATES = "generates"
    """It has an output layer."""
    EMBEDS = "embeds"
    """It has no output layer: its hidden states are pooled."""
    CLASSIFIES = "classifies"
    """A classification head takes one pooled hidden state."""


def model_kind(config: PretrainedConfig) -> ModelKind:
    """Return the kind named by `architectures` in config.json, by default GENERATES."""
    name = next(iter(getattr(config, "architectures", None) or ()), "")
    if name.endswith(_CLASSIFIER):
        return ModelKind.CLASSIFIES
    if name.endswith(_HEADS_OF_ENCODERS) or name in _base_names(config):
        return ModelKind.EMBEDS
    return ModelKind.GENERATES


def _base_names(config: PretrainedConfig) -> tuple[str, ...]:
    """Return the headless classes of this model type."""
    found = MODEL_MAPPING_NAMES.get(config.model_type, ())
    return (found,) if isinstance(found, str) else tuple(found)


def headless_class(config: PretrainedConfig, kind: ModelKind) -> Any:
    """Return the transformers class for a model without an output layer."""
    found = AutoModel if kind is ModelKind.EMBEDS else AutoModelForSequenceClassification
    if type(config) not in found._model_mapping:
        raise UnsupportedModel(
            f"{config.model_type}: transformers has no model of it that {kind.value}"
        )
    return found


def sentence_modules(directory: str, kind: ModelKind) -> SentenceModules:
    """Return the modules after a checkpoint's transformer; a classification head replaces them."""
    if kind is ModelKind.CLASSIFIES:
        return SentenceModules()
    try:
        return read_sentence_modules(Path(directory))
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
