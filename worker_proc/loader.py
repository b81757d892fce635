"""Turns a checkpoint directory into a model that is ready to run, or into a clear refusal.

Everything that can be known without weights is checked before they are read: the configuration,
and, by running the model's own code on the meta device, which attention it asks for.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from worker_proc.attention.interface import IMPLEMENTATION, register
from worker_proc.attention.probe import ProbedLayer, probe_layers
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.runner import Progress

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention"}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, and what its configuration says."""

    model: PreTrainedModel
    layers: list[ProbedLayer]
    """Its attention layers, in the order in which the forward calls them."""
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    model_len: int
    """The longest context that it can compute."""
    eos_token_ids: list[int]


def load_model(directory: str, dtype: str, device: torch.device, progress: Progress) -> LoadedModel:
    """Load the checkpoint in `directory`.

    Args:
        directory: with config.json and safetensors files.
        dtype: "auto", "float32", "bfloat16" or "float16".
        device: where the weights go.
        progress: told about the phases "inspect" and "load_weights".

    Raises:
        CheckpointError: a file or tensor is missing.
        UnsupportedModel: the model cannot be computed correctly here.
    """
    progress("inspect", 0, 1)
    config = _read_config(directory)
    text_config = config.get_text_config(decoder=True)
    _check_config(config, text_config)
    layers = probe_layers(_meta_model(config), text_config.num_hidden_layers)
    model_len = _model_len(text_config)
    torch_dtype = _resolve_dtype(dtype, config, device)
    progress("inspect", 1, 1)
    model = _load_weights(directory, torch_dtype, progress).to(device)
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        layers=layers,
        dtype=torch_dtype,
        device=device,
        vocab_size=text_config.vocab_size,
        model_len=model_len,
        eos_token_ids=_eos_token_ids(model, text_config),
    )


def _read_config(directory: str) -> PretrainedConfig:
    if not (Path(directory) / "config.json").is_file():
        raise CheckpointError(f"{directory} holds no config.json")
    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise UnsupportedModel(
            f"{directory}: transformers has no code of its own for this configuration: {error}"
        ) from error


def _check_config(config: PretrainedConfig, text_config: PretrainedConfig) -> None:
    kind = config.model_type
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModel(f"{kind}: quantized checkpoints are not supported")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{kind}: encoder-decoder models are not supported")
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    if strange := layer_types - _ATTENTION_LAYER_TYPES:
        raise UnsupportedModel(f"{kind}: layers of type {', '.join(sorted(strange))}")
    if getattr(text_config, "num_kv_shared_layers", 0):
        raise UnsupportedModel(f"{kind}: layers that share their KV are not supported")
    if getattr(text_config, "add_cross_attention", False):
        raise UnsupportedModel(f"{kind}: cross attention is not supported")


def _meta_model(config: PretrainedConfig) -> PreTrainedModel:
    try:
        with torch.device("meta"), no_init_weights():
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False).eval()
    except ValueError as error:
        raise UnsupportedModel(f"{config.model_type}: no causal language model: {error}") from error


def _model_len(text_config: PretrainedConfig) -> int:
    model_len = getattr(text_config, "max_position_embeddings", None)
    if model_len is None:
        raise UnsupportedModel(f"{text_config.model_type}: config.json bounds no positions")
    rope = getattr(text_config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    for parameters in nested or [rope]:
        if parameters.get("rope_type") == "longrope":
            # Past this length every request of a step would get other frequencies.
            original = parameters.get("original_max_position_embeddings") or model_len
            model_len = min(model_len, original)
    return int(model_len)


def _resolve_dtype(name: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    if name != "auto":
        return _DTYPES[name]
    dtype = getattr(config, "dtype", None) or config.get_text_config(decoder=True).dtype
    if dtype is None:
        return torch.float32
    if dtype not in _DTYPES.values():
        raise UnsupportedModel(f"{config.model_type}: weights of type {dtype}")
    if dtype == torch.float16 and device.type == "cpu":
        _log.info("float16 weights are computed in float32 on the CPU")
        return torch.float32
    return dtype  # type: ignore[no-any-return]


def _load_weights(directory: str, dtype: torch.dtype, progress: Progress) -> PreTrainedModel:
    register()
    try:
        with _reported(progress):
            model, info = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=IMPLEMENTATION,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: {error}") from error
    problems = [f"misses {key}" for key in sorted(info["missing_keys"])]
    problems += [f"has another shape of {key}" for key in sorted(map(str, info["mismatched_keys"]))]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"{directory} {', '.join(problems[:3])}{more}")
    return model


class _ReportingBar:
    """Passes an iteration on, and tells how far it is."""

    def __init__(self, items: Any, progress: Progress) -> None:
        self._items = items
        self._progress = progress

    def __iter__(self) -> Iterator[Any]:
        total = len(self._items)
        for done, item in enumerate(self._items):
            self._progress("load_weights", done, total)
            yield item
        self._progress("load_weights", total, total)


@contextmanager
def _reported(progress: Progress) -> Iterator[None]:
    """Let transformers' progress bar over the weights speak to `progress`, and print nothing.

    What its report would say about missing tensors comes as an error instead.
    """

    def hook(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and hasattr(args[0], "__len__"):
            return _ReportingBar(args[0], progress)
        return factory(*args, **{**kwargs, "disable": True})

    previous = transformers_logging.set_tqdm_hook(hook)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        transformers_logging.set_tqdm_hook(previous)


def _eos_token_ids(model: PreTrainedModel, text_config: PretrainedConfig) -> list[int]:
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    ids = eos if isinstance(eos, list) else [eos]
    return [token_id for token_id in ids if token_id is not None and token_id >= 0]
