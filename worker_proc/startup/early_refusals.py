"""Refuses models that config.json, or the headers of weights, exclude.

This happens before torch and transformers are imported, which takes most of the time of a start
that is refused. Uncertain cases pass here, and are checked again with transformers' own reading of
the files.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from protocol.config import EngineConfig, ModelConfig
from worker_proc.errors import CheckpointError, InsufficientMemory, UnsupportedModel
from worker_proc.loading.checkpoint import check_config_files
from worker_proc.loading.same_code import computed_type
from worker_proc.parallel.share import Share, refuse
from worker_proc.quantization.headers import read_headers, read_object
from worker_proc.quantization.methods import (
    KEY,
    MLX,
    MLX_KEY,
    check_method,
    check_mlx_type,
    check_rotations,
    method_of,
)
from worker_proc.startup.model_types import model_types

_LENGTH = "max_position_embeddings"
_NUM_HEADS = "num_attention_heads"
_HYBRID = ("mamba", "attn_layer")
"""Parts of the keys of models that may have attention in some layers only, or in none."""
_DECODER = "it is the decoder of an encoder-decoder model"
_NOT_COMPUTED = {
    "blt": "texts in patches of bytes, which a second model divides, are not supported",
    "cpmant": "attention with a bias for each pair of rows, by segment, is not supported",
    "git": "attention with a mask that its own code adds up is not supported",
    "kosmos-2.5": "positions that leave out padding tokens are not supported",
    "reformer": "attention within buckets of similar tokens is not supported",
    "trocr": _DECODER,
    "unlimited_ocr": "layers of type reference_sliding_attention are not supported",
    "xlm": "attention whose mask follows from the number of padding tokens is not supported",
    "xlnet": "scores of attention with products of queries and relative positions are not"
    " supported",
    "xlstm": "layers that mix tokens in a way of their own are not supported",
}
"""Reasons to refuse model types, some of whose code in transformers does not reveal them."""
_NO_DECODERS = {
    **dict.fromkeys(
        (
            *("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"),
            *("xlm-roberta", "xlm-roberta-xl", "xmod"),
        ),
        "positions that leave out padding tokens are not supported in decoders",
    ),
    "rembert": "embeddings narrower than the layers are not supported in such decoders",
    "roformer": "positions that layers count themselves are not supported in decoders",
}
"""Reasons to refuse encoders whose checkpoint is a decoder."""
_ENCODERS = _NO_DECODERS.keys() | {
    *("bert", "bert-generation", "big_bird", "electra", "ernie", "megatron-bert", "roc_bert"),
}
"""Model types that transformers can make decoders of, with the key is_decoder."""
_ENCODER_DECODERS = frozenset(
    (
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt"),
        *("led", "longt5", "m2m_100", "marian", "mbart", "mt5", "musicgen", "musicgen_melody"),
        *("mvp", "nllb-moe", "pegasus", "pegasus_x", "pix2struct", "plbart", "pp_formulanet"),
        *("prophetnet", "seamless_m4t", "seamless_m4t_v2", "switch_transformers", "t5", "t5gemma"),
        *("t5gemma2", "udop", "umt5", "vision-encoder-decoder", "whisper"),
    )
)
"""Generating types that have an encoder unless config.json sets is_encoder_decoder to false."""
_NOT_FROM_TEXT = {
    **dict.fromkeys(
        ("blip", "blip-2", "idefics", "instructblip", "instructblipvideo", "kosmos-2"),
        "transformers computes no text with this model without an image",
    ),
    "diffusion_gemma": "it writes blocks of tokens by diffusion, not token by token",
    "evolla": "transformers finds no class for its configuration",
    "florence2": "encoder-decoder models are not supported",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "it drafts tokens from the states of another model and writes no texts alone",
    ),
    "paligemma": "prompts that attend in both directions are not supported",
    "pi0": "it computes the movements of a robot and writes no texts",
    "shieldgemma2": "it classifies images and writes no texts",
    **dict.fromkeys(
        ("kyutai_speech_to_text", "voxtral_realtime"),
        "it computes each token from a piece of sound",
    ),
}
"""Reasons to refuse the generating models of other types, most of which continue no text alone."""
_UNSCALED = ("default", "llama3")
"""Types of rotary embeddings that do not extend the context."""
_TEXT_HEADS = ("LMHeadModel", "GenerationDecoder")
"""Suffixes of the names of classes that write texts and have no "For" in them."""
_HEADS = ("ForSequenceClassification", "ForMaskedLM", "ForPreTraining")
"""Suffixes of the class names of pooling models."""
_OTHER_HEADS = (
    *("ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"),
    "ForNextSentencePrediction",
)
"""Suffixes of the class names of models that neither write texts nor are pooled."""


def refuse_early(config: EngineConfig) -> None:
    """Raise the reason why files exclude the model, its draft model, or too few KV blocks."""
    refuse_blocks(config, refuse_model(config.model))


def refuse_model(model: ModelConfig) -> dict[str, Any]:
    """Return the content of config.json, or raise why files exclude the model or its draft model.

    The draft model is checked if there is one.
    """
    config = refuse_config(model.model)
    if model.speculative_model is not None:
        refuse_config(model.speculative_model)
    for directory in (model.model, model.speculative_model):
        if directory is not None:
            read_headers(directory)  # raises for files that are missing or truncated
    if model.max_model_len is None:
        return config
    length = _certain_length(config)
    if length is not None and model.max_model_len > length:
        raise CheckpointError(
            f"max_model_len {model.max_model_len} is greater than the {length} tokens that"
            f" config.json of {model.shown_model} states"
        )
    return config


def refuse_blocks(config: EngineConfig, contents: Mapping[str, Any]) -> None:
    """Raise InsufficientMemory if the configured KV blocks hold no sequence of the context.

    `contents` is the content of config.json. Only a model that certainly has attention is refused,
    and only for blocks that it needs with any window: the windows of its layers are not known here.
    """
    max_model_len, num_blocks = config.model.max_model_len, config.cache.num_gpu_blocks_override
    if max_model_len is None or num_blocks is None or not _writes_texts(contents):
        return
    if _certain_heads(contents) is None:
        return
    block_size = config.cache.block_size
    max_chunk = config.scheduler.max_num_batched_tokens
    # The last sampled token needs no slot, and one block is the null block.
    needed = 1 + min(-(-(max_model_len - 1) // block_size), -(-max_chunk // block_size) + 1)
    if num_blocks < needed:
        raise InsufficientMemory(
            f"max_model_len {max_model_len} needs {needed} blocks of {block_size} tokens at least,"
            f" and num_gpu_blocks_override is {num_blocks}; max_model_len can be"
            f" {(num_blocks - 1) * block_size + 1} with it at most"
        )


def refuse_ranks(model: ModelConfig, num_ranks: int) -> None:
    """Raise UnsupportedModel if config.json shows that `num_ranks` cannot divide a layer."""
    num_heads = _certain_heads(read_object(Path(model.model) / "config.json"))
    if num_heads is not None and num_heads % num_ranks:
        reason = f"config.json of {model.shown_model} states {num_heads} attention heads"
        raise refuse(Share(0, num_ranks), reason)


def refuse_config(directory: str) -> dict[str, Any]:
    """Return the content of a directory's config.json, or raise why it excludes the model."""
    check_config_files(directory)
    path = Path(directory) / "config.json"
    config = read_object(path)
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise UnsupportedModel(f"{path} has no model_type, which names the code of the model")
    model_type = computed_type(model_type)
    found = model_types()
    if found is not None and model_type not in found.known:
        raise UnsupportedModel(
            f"{path}: model_type is {model_type!r}, for which the installed transformers has no"
            " code of its own; code from a checkpoint is not executed"
        )
    if model_type in _NOT_COMPUTED:
        raise UnsupportedModel(f"{model_type}: {_NOT_COMPUTED[model_type]}")
    if model_type in _NOT_FROM_TEXT and _writes_texts(config):
        raise UnsupportedModel(f"{model_type}: {_NOT_FROM_TEXT[model_type]}")
    if (name := _class_name(config)) is not None and name.endswith(_OTHER_HEADS):
        raise UnsupportedModel(f"{model_type}: the output layer of {name} is not supported")
    if model_type in _ENCODERS and _writes_texts(config):
        _refuse_encoder(model_type, config)
    if model_type == "doge" and config.get("is_moe") is True:
        raise UnsupportedModel(
            f"{model_type}: experts that are chosen by the number of tokens in a forward are not"
            " supported"
        )
    if config.get("is_encoder_decoder", model_type in _ENCODER_DECODERS) is True:
        raise UnsupportedModel(f"{model_type}: encoder-decoder models are not supported")
    if model_type in _ENCODER_DECODERS and _writes_texts(config):
        raise UnsupportedModel(f"{model_type}: {_DECODER}")
    if found is not None and model_type not in found.generating and _writes_texts(config):
        raise UnsupportedModel(
            f"{model_type}: no causal language model: transformers has no class that writes texts"
            " for this model_type"
        )
    _refuse_format(path, config, model_type)
    return config


def _refuse_format(path: Path, config: Mapping[str, Any], model_type: str) -> None:
    """Raise UnsupportedModel for codes in an unknown format, and for weights of rotated rows."""
    for section in (config, config.get("text_config")):
        if not isinstance(section, dict):
            continue
        check_rotations(path, section, key="")
        if isinstance(section.get(KEY), dict):
            check_method(path, method_of(section[KEY]), model_type)
            check_rotations(path, section[KEY])
    if "text_config" not in config and any(
        isinstance(config.get(key), dict) and method_of(config[key]) == MLX
        for key in (KEY, MLX_KEY)
    ):
        check_mlx_type(model_type)


def _writes_texts(config: Mapping[str, Any]) -> bool:
    """Return whether the class named in config.json has a head, but not that of a pooling model.

    A configuration without a class name counts as one with such a head.
    """
    name = _class_name(config)
    if not name:
        return name is not None
    return ("For" in name or name.endswith(_TEXT_HEADS)) and not name.endswith(_HEADS)


def _class_name(config: Mapping[str, Any]) -> str | None:
    """Return the name of the class in config.json; empty: it has none; None: it is not a text."""
    names = config.get("architectures") or [""]
    name = names[0] if isinstance(names, list) else None
    return name if isinstance(name, str) else None


def _refuse_encoder(model_type: str, config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel if an encoder cannot write texts, although its class would."""
    reason = _NO_DECODERS.get(model_type)
    if reason is None and config.get("is_decoder") is not True:
        reason = "its attention is causal only where config.json sets is_decoder to true"
    if reason is not None:
        raise UnsupportedModel(f"{model_type}: {reason}")


def _certain_length(config: Mapping[str, Any]) -> int | None:
    """Return the context that config.json allows; None: angles or parts may change it."""
    text = config.get("text_config", config)
    if not isinstance(text, dict) or (text is config and any(_LENGTH in one for one in _in(text))):
        return None
    length = text.get(_LENGTH)
    for parameters in (text.get("rope_parameters"), text.get("rope_scaling")):
        if not parameters:
            continue
        kind = parameters.get("rope_type", parameters.get("type", "default"))
        if kind not in _UNSCALED or any(_in(parameters)):
            return None
    return length if isinstance(length, int) and length > 0 else None


def _certain_heads(config: Mapping[str, Any]) -> int | None:
    """Return the number of attention heads, if config.json has one number for all layers."""
    text = config.get("text_config", config)
    if not isinstance(text, dict) or any(_states_heads(one) for one in _in(text)):
        return None
    is_certain = not any(part in key for key in text for part in _HYBRID)
    for key, value in text.items():
        if key != _NUM_HEADS and _NUM_HEADS in key:
            return None  # it applies to some layers
        names = [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
        if "type" in key and names:
            if not any("attention" in name and "linear" not in name for name in names):
                return None  # its layers may have no attention
            is_certain = True
    if not is_certain:
        return None
    num_heads = text.get(_NUM_HEADS)
    return num_heads if isinstance(num_heads, int) and num_heads > 0 else None


def _states_heads(section: Mapping[str, Any]) -> bool:
    return any(_NUM_HEADS in key for key in section)


def _in(section: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the sections within a section."""
    return (value for value in section.values() if isinstance(value, dict))
