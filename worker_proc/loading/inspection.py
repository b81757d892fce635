"""Inspects a model without its weights: its configuration, and the computation of its code.

The model's own code runs on the meta device, which reveals its attention and the parameters that it
uses. A model that cannot be served is refused with the reason.
"""

import copy
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from protocol.config.sentence_modules import SentenceModules
from worker_proc.attention.probe import ProbedModel, probe_model
from worker_proc.attention.within_tokens import attend_in_tokens
from worker_proc.errors import (
    CheckpointError,
    InsufficientMemory,
    UnsupportedModel,
    unsupported_failures,
)
from worker_proc.kv.kv_tensors import format_sizes
from worker_proc.loading.checkpoint import DTYPES, check_config_files, describe_rejection
from worker_proc.loading.context import cached_length, context_length
from worker_proc.loading.deferred_module import load_meta_kernels
from worker_proc.loading.frequencies import fix_frequencies
from worker_proc.loading.host_limits import available_memory
from worker_proc.loading.kept_rows import keep_rows
from worker_proc.loading.model_kind import ModelKind, model_kind, sentence_modules
from worker_proc.loading.pooling_model import drop_pooler
from worker_proc.loading.proofs import proven
from worker_proc.loading.same_code import computed_type
from worker_proc.loading.start_cache import StartCache
from worker_proc.loading.text_model import auto_class, part_for_texts
from worker_proc.loading.unbuilt_parts import without_libraries
from worker_proc.loading.uncached_attention import route_uncached
from worker_proc.quantization.formats import take_format
from worker_proc.quantization.headers import read_object
from worker_proc.quantization.scheme import CheckpointFormat
from worker_proc.sampling.heads import check_dense

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_ATTENTION_LAYER_TYPES = {
    *("full_attention", "sliding_attention", "chunked_attention", "indexed_attention"),
    *("compressed_sparse_attention", "heavily_compressed_attention"),
}
_RECURRENT_LAYER_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_ROW_LAYER_TYPES = {"mlp", "moe"}
"""Layers that compute each row separately."""
_log = logging.getLogger("troika.worker")


class InspectedModel(NamedTuple):
    """Facts about a model that do not depend on its weights."""

    config: PretrainedConfig
    text_config: PretrainedConfig
    probed: ProbedModel
    model_len: int
    dtype: torch.dtype
    format: CheckpointFormat | None
    """The format of a quantized checkpoint; None: it is not quantized."""
    kind: ModelKind
    modules: SentenceModules


def inspect_config(
    directory: str,
    dtype: str,
    device: torch.device,
    proofs: StartCache | None = None,
    *,
    max_model_len: int | None = None,
    other_bytes: int = 0,
    num_ranks: int = 1,
) -> InspectedModel:
    """Check everything that can be checked without weights, which need not be present.

    `max_model_len` is the context that the engine requests, if any. `other_bytes` is the size of
    another model's weights that will be in memory, too. `num_ranks` ranks divide the weights among
    their GPUs, or share the host's memory. Raises UnsupportedModel, CheckpointError or
    InsufficientMemory.
    """
    config = read_config(directory)
    with unsupported_failures(config.model_type):
        inspected = _inspect(directory, config, dtype, device, proofs, max_model_len=max_model_len)
    probed = inspected.probed
    if probed.recurrent and device.type != "cpu":
        raise UnsupportedModel(
            f"{config.model_type}: layers with a recurrent state are computed on the CPU only, not"
            f" on {device.type}"
        )
    if inspected.format is None:
        num_bytes = probed.num_weights * inspected.dtype.itemsize
        if device.type != "cpu":
            num_bytes //= num_ranks
        check_room(num_bytes, device, other_bytes)
    return inspected


def read_config(directory: str) -> PretrainedConfig:
    """Check the configuration files, and read the configuration."""
    check_config_files(directory)
    unknown = f"{directory}: transformers has no code of its own for this configuration"
    with _rejections(directory, unknown):
        config = _own_config(directory)
    return part_for_texts(config)


def _own_config(directory: str) -> PretrainedConfig:
    """Read config.json as a configuration of the type that computes the model."""
    content = read_object(Path(directory) / "config.json")
    model_type = str(content.get("model_type"))
    config: PretrainedConfig
    if (other := computed_type(model_type)) != model_type:
        config = CONFIG_MAPPING[other].from_dict(content | {"model_type": other})
    else:
        config = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    return config


def _inspect(
    directory: str,
    config: PretrainedConfig,
    dtype: str,
    device: torch.device,
    proofs: StartCache | None,
    *,
    max_model_len: int | None,
) -> InspectedModel:
    """Check a configuration, and the computation of its model on the meta device."""
    text_config = config.get_text_config(decoder=True)
    format = take_format(Path(directory) / "config.json", config)
    _check_config(config, text_config)
    kind = model_kind(config)
    modules = sentence_modules(directory, kind)
    check_dense(modules.dense, text_config.hidden_size)
    probed = proven(proofs, "probe", ProbedModel, lambda: _probe(directory, config))
    has_codes = format is not None and not format.sources  # GGUF files declare bfloat16
    torch_dtype = _resolve_dtype(dtype, config, device, is_quantized=has_codes)
    if format is not None and kind is ModelKind.CLASSIFIES:
        raise UnsupportedModel(
            f"{config.model_type}: a classification head in a checkpoint that is quantized"
            f" ({format.method})"
        )
    model_len = context_length(
        text_config, has_attention=bool(probed.layers), max_model_len=max_model_len
    )
    model_len -= probed.position_offset
    model_len = min(model_len, modules.max_seq_length or model_len)
    for length, reason in (
        (
            probed.cached_length,
            "transformers' cache keeps as many (sliding_window), and attention sees all",
        ),
        (
            probed.indexed_length,
            "its indexers choose all of them, and sparse attention beyond is not computed",
        ),
        (
            probed.masked_length,
            "beyond (keep_window_size) tokens are hidden for the biases of their keys, which is"
            " not computed",
        ),
    ):
        if length is not None and length < model_len:
            model_len = length
            _log.info("the context is %d tokens at most: %s", model_len, reason)
    return InspectedModel(
        config, text_config, probed, model_len, torch_dtype, format, kind, modules
    )


def _probe(directory: str, config: PretrainedConfig) -> ProbedModel:
    """Build the model without memory, and run it."""
    model = build_skeleton(directory, config)
    fix_frequencies(model, None)
    text_config = config.get_text_config(decoder=True)
    layer_types = getattr(text_config, "layer_types", None) or ()
    num_row_layers = sum(layer_type in _ROW_LAYER_TYPES for layer_type in layer_types)
    has_output_layer = model_kind(config) is ModelKind.GENERATES
    num_layers = text_config.num_hidden_layers - num_row_layers
    probed = probe_model(model, num_layers, has_output_layer=has_output_layer)
    if not has_output_layer:
        return probed
    # The model's code, which a later start does not import, registers its types of cache layers.
    length = cached_length(config, [layer.spec for layer in probed.layers])
    return replace(probed, cached_length=length)


def build_skeleton(directory: str, config: PretrainedConfig) -> PreTrainedModel:
    """Build the model without memory."""
    load_meta_kernels()
    no_model = f"{config.model_type}: no causal language model"
    with (
        _rejections(directory, no_model),
        torch.device("meta"),
        no_init_weights(),
    ):
        own_config = copy.deepcopy(config)  # the probe changes it
        build = partial(auto_class(config).from_config, own_config, trust_remote_code=False)
        model = without_libraries(build)
        if model_kind(config) is ModelKind.EMBEDS:
            drop_pooler(model)
    model.tie_weights()  # skipped by transformers if weights are not initialized
    ignore_padding(model)
    keep_rows(model)
    route_uncached(model)
    attend_in_tokens(model)
    return cast(PreTrainedModel, model.eval())


def ignore_padding(model: PreTrainedModel) -> None:
    """Keep models from searching ids for padding, which packed rows do not have."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None


def check_room(num_bytes: int, device: torch.device, other_bytes: int = 0) -> None:
    """Raise InsufficientMemory if the weights alone do not fit in free memory.

    `other_bytes` is the size of another model's weights.
    """
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if num_bytes + other_bytes > free:
        needed, there = format_sizes(num_bytes + other_bytes, free)
        models = " of the model and of its draft model" if other_bytes else ""
        raise InsufficientMemory(
            f"the weights{models} need {needed} of memory, but only {there} are free"
            f" ({device.type}); free some, or choose a smaller model or dtype"
        )


@contextmanager
def _rejections(directory: str, unsupported: str) -> Iterator[None]:
    """Convert errors of transformers to UnsupportedModel or CheckpointError."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UnsupportedModel(f"{unsupported}: {error}") from error
    except MemoryError:
        raise
    except Exception as error:
        raise CheckpointError(describe_rejection(directory, error)) from error


def _check_config(config: PretrainedConfig, text_config: PretrainedConfig) -> None:
    for holder, key, feature in (
        (config, "is_encoder_decoder", "encoder-decoder models are"),
        (text_config, "add_cross_attention", "cross attention is"),
    ):
        if getattr(holder, key, None) not in (None, False, 0):
            raise UnsupportedModel(f"{config.model_type}: {feature} not supported")
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    known = _ATTENTION_LAYER_TYPES | _RECURRENT_LAYER_TYPES | _ROW_LAYER_TYPES
    if unknown := layer_types - known:
        raise UnsupportedModel(f"{config.model_type}: layers of type {', '.join(sorted(unknown))}")


def _resolve_dtype(
    name: str, config: PretrainedConfig, device: torch.device, *, is_quantized: bool
) -> torch.dtype:
    """Return the compute dtype; "auto": that of config.json, but bfloat16 for float32 weights."""
    if name != "auto":
        return _DTYPES[name]
    dtype = getattr(config, "dtype", None) or config.get_text_config(decoder=True).dtype
    dtype = dtype or torch.float32
    if dtype not in _DTYPES.values():
        raise UnsupportedModel(f"{config.model_type}: weights of type {dtype}")
    if dtype == torch.float32:
        _log.info("float32 weights are rounded to bfloat16; --dtype float32 keeps them")
        return torch.bfloat16
    if dtype == torch.float16 and device.type == "cpu" and is_quantized:
        _log.info("float16 is computed as bfloat16 on the CPU")
        return torch.bfloat16
    if dtype == torch.float16 and device.type == "cpu":
        _log.info("float16 weights are computed in float32 on the CPU")
        return torch.float32
    return dtype
