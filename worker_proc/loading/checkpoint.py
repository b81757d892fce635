"""Checks the files of a checkpoint before transformers reads them.

transformers reports some mistakes without naming the file or the key, and ignores others: weights
that are stored in an unexpected format are loaded as garbage.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from worker_proc.errors import CheckpointError
from worker_proc.quantization.headers import StoredTensor, read_object

DTYPES = ("float32", "bfloat16", "float16")
"""The dtypes in which weights can be computed."""

_CONFIG_DTYPES = (*DTYPES, "float64")
"""float64 weights can be loaded in another dtype."""
_STORED_DTYPES = frozenset({"F64", "F32", "BF16", "F16"})
INDEX_DTYPES = frozenset({"I64", "BOOL"})
"""Dtypes of buffers with indices and choices, for example in vision towers; weights have others."""
_POSITIONS = ("max_position_embeddings", "n_positions")
_MIN_VALUES: dict[str, int] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "n_embd", "num_hidden_layers", "n_layer"), 1),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads", "head_dim"), 1),
    **dict.fromkeys(_POSITIONS, 2),
}
"""Integer keys of config.json, and the smallest valid value of each."""
_UNUSED_BUFFER = re.compile(
    r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$|(^|\.)position_ids$|(^|\.)decoder\.version$"
    r"|\.num_batches_tracked$|\.[kqv]_scale$"
)
_UNUSED_MASK = re.compile(r"(^|\.)(attn|attention|self_attn)\.(masked_)?bias$")


def check_config_files(directory: str) -> None:
    """Check configuration keys that transformers does not check.

    Raises CheckpointError, which names the file, the key and the value.
    """
    path = Path(directory) / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{directory} holds no config.json")
    config = read_object(path)
    if (text_config := config.get("text_config")) is None:
        _check_section(path, "", config)
    else:
        _require(isinstance(text_config, dict), path, "text_config", text_config, "an object")
        # The positions beside a text's part are those of sound (Music Flamingo).
        beside = {key: value for key, value in config.items() if key not in _POSITIONS}
        _check_section(path, "", beside)
        _check_section(path, "text_config.", text_config)
    generation = Path(directory) / "generation_config.json"
    if generation.is_file():
        _check_eos(generation, "", read_object(generation))


def _require(holds: bool, path: Path, key: str, value: object, expected: str) -> None:
    if not holds:
        raise CheckpointError(f"{path}: {key} is {json.dumps(value)[:100]}, and must be {expected}")


def _is_int(value: object, min_value: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= min_value


def _check_section(path: Path, prefix: str, section: dict[str, Any]) -> None:
    def require(holds: bool, key: str, expected: str) -> None:
        _require(holds, path, prefix + key, section[key], expected)

    rotated = {"head_dim": 0} if section.get("kv_lora_rank") else {}  # latent attention may not be
    for key, min_value in (_MIN_VALUES | rotated).items():
        if section.get(key) is not None:
            require(_is_int(section[key], min_value), key, f"an integer of at least {min_value}")
    found = (section.get(key) for key in ("num_attention_heads", "n_head", "n_heads"))
    if num_heads := next(filter(None, found), None):  # some models have another key
        _check_heads(path, prefix, section, num_heads)
    for key in ("dtype", "torch_dtype"):
        if section.get(key) not in (None, "auto"):
            require(section[key] in _CONFIG_DTYPES, key, f"one of {', '.join(_CONFIG_DTYPES)}")
    for key in ("rope_parameters", "rope_scaling"):
        if section.get(key) is not None:
            require(isinstance(section[key], dict), key, "an object")
            _check_rope(path, f"{prefix}{key}.", section[key])
    if section.get("rope_theta") is not None:
        _check_rope(path, prefix, {"rope_theta": section["rope_theta"]})
    if section.get("quantization_config") is not None:
        require(
            isinstance(section["quantization_config"], dict), "quantization_config", "an object"
        )
    if (layer_types := section.get("layer_types")) is not None:
        is_list = isinstance(layer_types, list) and all(isinstance(x, str) for x in layer_types)
        require(is_list, "layer_types", "a list of names")
    _check_eos(path, prefix, section)


def _check_heads(path: Path, prefix: str, section: dict[str, Any], num_heads: int) -> None:
    """Check what attention heads divide, and what divides them."""
    groups = section.get("num_key_value_heads") or 1
    expected = f"a divisor of the {num_heads} of num_attention_heads"
    _require(num_heads % groups == 0, path, f"{prefix}num_key_value_heads", groups, expected)
    if section.get("head_dim") is not None:
        return
    expected = f"a multiple of the {num_heads} attention heads, without head_dim"
    for key in ("hidden_size", "n_embd"):
        size = section.get(key) or 0
        _require(size % num_heads == 0, path, prefix + key, size, expected)


def _check_rope(path: Path, prefix: str, parameters: dict[str, Any]) -> None:
    """Check one set of rope parameters, or a set for each type of layer."""
    for key in ("rope_theta", "factor"):
        if (value := parameters.get(key)) is not None:
            is_number = isinstance(value, int | float) and value > 0
            _require(is_number, path, f"{prefix}{key}", value, "a number greater than 0")
    for key, value in parameters.items():
        if isinstance(value, dict):
            _check_rope(path, f"{prefix}{key}.", value)


def _check_eos(path: Path, prefix: str, section: dict[str, Any]) -> None:
    eos = section.get("eos_token_id")
    ids = eos if isinstance(eos, list) else [eos]
    # Some checkpoints use -1 for none.
    is_known = eos is None or all(_is_int(token_id, -1) for token_id in ids)
    _require(is_known, path, f"{prefix}eos_token_id", eos, "a token id or a list of token ids")


def describe_rejection(directory: str, error: Exception) -> str:
    """Return the reason why transformers rejects a configuration, naming the key if possible.

    transformers raises a KeyError for an unknown name, such as an activation or a rope_type.
    """
    path = Path(directory) / "config.json"
    name = error.args[0] if isinstance(error, KeyError) and error.args else None
    if key := _key_of(name, read_object(path)):
        return f"{path}: {key} is {json.dumps(name)}, which transformers does not know"
    text = " ".join(str(error).split()) or "it cannot be built"
    return f"{path}: transformers rejects it: {type(error).__name__}: {text}"


def _key_of(value: object, section: dict[str, Any]) -> str:
    """Return the path of the first key whose value is this string; empty: there is none."""
    for key, found in section.items():
        if isinstance(value, str) and found == value:
            return key
        if isinstance(found, dict) and (inner := _key_of(value, found)):
            return f"{key}.{inner}"
    return ""


def check_stored_dtypes(directory: str, stored: Mapping[str, StoredTensor]) -> None:
    """Check that stored tensors are plain floats, indices or unused buffers.

    Raises CheckpointError for codes.
    """
    for name, tensor in stored.items():
        if tensor.dtype in _STORED_DTYPES or tensor.dtype in INDEX_DTYPES:
            continue
        if not is_unused_buffer(name, tensor):
            raise CheckpointError(
                f"{directory}/{tensor.file}: {name} is stored as {tensor.dtype}, and only"
                f" {', '.join(sorted(_STORED_DTYPES))} are supported, but for weights that a"
                " quantization_config in config.json describes"
            )


def is_unused_buffer(name: str, tensor: StoredTensor | None) -> bool:
    """Return whether a stored tensor is one that no forward reads.

    Old versions of transformers stored tensors that models compute now; batch norms count batches.
    Scales of queries, keys and values are those of a KV cache that is rounded with them.
    """
    if _UNUSED_BUFFER.search(name):
        return True
    # Causal masks of GPT-2 and others. A bias that is added has one dimension.
    is_mask = tensor is not None and len(tensor.shape) != 1
    return is_mask and _UNUSED_MASK.search(name) is not None
