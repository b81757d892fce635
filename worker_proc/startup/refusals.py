"""Refuses incompatible models and settings, before any weight is read.

Checks that depend on facts alone are made at each start. Checks that need the model's modules are
made on the meta device, once for a checkpoint and its settings.
"""

from collections.abc import Sequence
from typing import NamedTuple

from protocol.config import EngineConfig, KVCacheDtype, ModelConfig, Quantization, WorkerConfig
from worker_proc.attention.interface import attending_twice
from worker_proc.attention.native import can_attend
from worker_proc.attention.probed_layer import NO_ROW_TERMS, ProbedLayer
from worker_proc.calibration.memory import max_cache_bytes
from worker_proc.cuda.coverage import choose_attention
from worker_proc.errors import CheckpointError, UnsupportedModel, unsupported_failures
from worker_proc.kv.kv_format import FORMATS
from worker_proc.kv.kv_groups import KVLayout, LayerSpec, lay_out
from worker_proc.kv.kv_tensors import block_bytes_of, size_cache
from worker_proc.loading.context import length_key, stated_length
from worker_proc.loading.draft import group_without_window
from worker_proc.loading.inspection import check_room, read_config
from worker_proc.loading.loader import CheckedModel, rehearse
from worker_proc.loading.model_kind import ModelKind
from worker_proc.loading.proofs import proven
from worker_proc.loading.start_cache import StartCache
from worker_proc.modules.compressed import is_compressed
from worker_proc.modules.experts.few_experts import check_few_experts
from worker_proc.modules.latent import latent_specs
from worker_proc.modules.own_attention.biases import check_length, table_bytes
from worker_proc.modules.rounding_refusals import (
    check_plain_head,
    check_rounded_dtype,
    check_rounding,
)
from worker_proc.modules.weight_formats import WEIGHT_FORMATS
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary
from worker_proc.recurrent.sizing import choose_num_state_blocks
from worker_proc.recurrent.state_spec import state_bytes
from worker_proc.sampling.heads import check_head
from worker_proc.sampling.inverse_cdf import MAX_VOCAB_SIZE
from worker_proc.startup.swap_space import check_swap_space


class Rehearsal(NamedTuple):
    """The result of loading a model without values."""

    specs: list[LayerSpec]
    """Specs of the attention layers, with latent rows if the modules have the parts for them."""

    def of(self, layers: Sequence[ProbedLayer], own: Sequence[ProbedLayer]) -> "Rehearsal":
        """Return the rehearsal of the layers `own` among all attention layers."""
        names = {layer.module_name for layer in own}
        pairs = zip(layers, self.specs, strict=True)
        return Rehearsal([spec for layer, spec in pairs if layer.module_name in names])


def rehearse_model(
    checked: CheckedModel, quantization: Quantization | None, proofs: StartCache | None
) -> Rehearsal:
    """Check the tensors and modules of a model whose weights may be rounded."""
    return proven(proofs, "rehearsal", Rehearsal, lambda: _rehearse(checked, quantization))


def rehearse_draft(draft: CheckedModel, proofs: StartCache | None) -> None:
    """Check the tensors of the draft model."""
    proven(proofs, "rehearsal_draft", bool, lambda: rehearse(draft) is not None)


def rehearse_experts(
    checked: CheckedModel,
    quantization: Quantization,
    library: NativeLibrary,
    proofs: StartCache | None,
) -> None:
    """Try the experts whose weights will be rounded."""
    format = WEIGHT_FORMATS[quantization].layers

    def prove() -> bool:
        check_few_experts(rehearse(checked), library, format, quantization)
        return True

    proven(proofs, "experts_in_small", bool, prove)


def _rehearse(checked: CheckedModel, quantization: Quantization | None) -> Rehearsal:
    model, inspected = rehearse(checked), checked.inspected
    if quantization is not None and checked.files is not None:
        coded, method = checked.files.weights, checked.files.report.method
        check_plain_head(model, coded, method, quantization)
    elif quantization is not None:
        probed = inspected.probed
        check_rounding(model, probed.parameters, quantization, probed.recurrent)
    layers = inspected.probed.layers
    specs = [layer.spec for layer in layers]
    latent = latent_specs(model, layers) if checked.device.type == "cpu" else []
    if latent and can_attend(latent, inspected.dtype, checked.device):
        specs = latent
    if inspected.kind is ModelKind.CLASSIFIES:
        check_head(model)
    return Rehearsal(specs)


def check_stated_length(model: ModelConfig) -> None:
    """Refuse a context that config.json excludes, before the model's code runs.

    That code may reduce the context further.
    """
    if model.max_model_len is None:
        return
    config = read_config(model.model)
    with unsupported_failures(config.model_type):
        text_config = config.get_text_config(decoder=True)
        length = stated_length(text_config, model.max_model_len)
    if length is not None and model.max_model_len > length:
        raise CheckpointError(
            f"max_model_len {model.max_model_len} is greater than the {length} tokens that"
            f" config.json of {model.shown_model} states"
        )


def check_settings(checked: CheckedModel, config: EngineConfig) -> None:
    """Refuse settings that cannot be used with a model's facts; see worker_proc/errors.py."""
    inspected, model = checked.inspected, config.model
    if model.max_model_len is not None and model.max_model_len > inspected.model_len:
        raise CheckpointError(
            f"max_model_len {model.max_model_len} is greater than the {inspected.model_len} tokens"
            f" that {model.shown_model} can compute"
        )
    check_own_attention(checked, model.max_model_len)
    check_compressed(checked, config)
    check_score_terms(checked, config)
    _check_attention(checked, config.worker)
    if model.quantization is not None:
        check_rounded_dtype(inspected.dtype, model.quantization)
    vocab_size = inspected.text_config.vocab_size
    if vocab_size > MAX_VOCAB_SIZE:
        raise UnsupportedModel(
            f"{model.shown_model}: vocab_size is {vocab_size}, and at most {MAX_VOCAB_SIZE} are"
            " supported"
        )
    name = attending_twice(layer.module_name for layer in inspected.probed.layers)
    if name is not None and checked.is_causal and config.lora.enable_lora:
        raise UnsupportedModel(
            f"enable_lora is set, and {name} attends several times in a step: adapters of such"
            " models are not supported"
        )
    if inspected.kind is not ModelKind.GENERATES:
        _check_pooling(checked, config)
    check_swap_space(config.cache.swap_space_bytes)


def _check_attention(checked: CheckedModel, worker: WorkerConfig) -> None:
    """Refuse an attention backend that does not support the layers.

    A model's own attention is not known before its load.
    """
    inspected = checked.inspected
    if not inspected.probed.has_own_attention:
        choose_attention(inspected.probed.layers, inspected.dtype, checked.device, worker)


def has_entries(checked: CheckedModel) -> bool:
    """Return whether a model attends over compressed entries."""
    return is_compressed([layer.spec for layer in checked.inspected.probed.layers])


def check_compressed(checked: CheckedModel, config: EngineConfig) -> None:
    """Refuse settings that attention over compressed entries does not support."""
    if not has_entries(checked):
        return
    inspected, cache, parallel = checked.inspected, config.cache, config.parallel
    kind = f"{inspected.config.model_type} attends over compressed entries"
    if checked.device.type != "cpu":
        raise UnsupportedModel(f"{kind}, which only the CPU computes, not {checked.device.type}")
    if inspected.dtype not in NATIVE_DTYPES:
        raise UnsupportedModel(
            f"{kind}, which is computed in float32 and bfloat16, not in {_dtype_name(checked)}"
        )
    if cache.kv_cache_dtype is not KVCacheDtype.AUTO:
        raise UnsupportedModel(
            f"kv_cache_dtype {cache.kv_cache_dtype}: {kind}, and its cache holds the model's type"
            " only"
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (number := getattr(parallel, name)) > 1:
            raise UnsupportedModel(f"{name} {number}: {kind}, which one worker computes")


def check_score_terms(checked: CheckedModel, config: EngineConfig) -> None:
    """Refuse settings that score terms from rows do not support."""
    terms = [layer.row_terms for layer in checked.inspected.probed.layers]
    has_key_biases = any(one.has_key_biases for one in terms)
    if all(one == NO_ROW_TERMS for one in terms):
        return
    what = "a bias of each key" if has_key_biases else "biases of each query by distance"
    kind = f"{checked.inspected.config.model_type} has scores with {what}"
    if checked.device.type != "cpu":
        raise UnsupportedModel(f"{kind}, which only the CPU computes, not {checked.device.type}")
    if has_key_biases and config.cache.kv_cache_dtype is not KVCacheDtype.AUTO:
        raise UnsupportedModel(
            f"kv_cache_dtype {config.cache.kv_cache_dtype}: {kind}, and its cache holds the model's"
            " type only"
        )
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (number := getattr(config.parallel, name)) > 1:
            raise UnsupportedModel(f"{name} {number}: {kind}, which one worker computes")


def check_own_attention(checked: CheckedModel, max_model_len: int | None) -> None:
    """Refuse a context for which the biases of a model's own attention take too much memory."""
    inspected = checked.inspected
    if not inspected.probed.has_own_attention:
        return
    if max_model_len is not None:
        length, source = max_model_len, "max_model_len"
    else:
        length = inspected.model_len
        source = f"{length_key(inspected.text_config)} in {checked.directory}/config.json"
    check_length(length, source)
    num_bytes = table_bytes(inspected.probed.layers, length)
    if inspected.format is None:
        num_bytes += inspected.probed.num_weights * inspected.dtype.itemsize
    check_room(num_bytes, checked.device)


def _check_pooling(checked: CheckedModel, config: EngineConfig) -> None:
    """Refuse settings that need an output layer or a cache, for a model that only pools."""
    name, kv_cache_dtype = config.model.shown_model, config.cache.kv_cache_dtype
    if number := config.scheduler.num_speculative_tokens:
        raise UnsupportedModel(
            f"num_speculative_tokens is {number}, and {name} generates no tokens"
        )
    if config.lora.enable_lora:
        raise UnsupportedModel(
            f"enable_lora is set, and {name} has no output layer: adapters of such models are not"
            " supported"
        )
    quantization = config.model.quantization
    if checked.inspected.kind is ModelKind.CLASSIFIES and quantization is not None:
        raise UnsupportedModel(
            f"quantization is {quantization}, and {name} has a classification head"
        )
    if not checked.is_causal and kv_cache_dtype is not KVCacheDtype.AUTO:
        raise UnsupportedModel(
            f"kv_cache_dtype is {kv_cache_dtype}, and {name} has no KV cache, since its attention"
            " is not causal"
        )


def check_cache(checked: CheckedModel, rehearsal: Rehearsal, config: EngineConfig) -> None:
    """Refuse a KV cache that cannot exist as configured; see worker_proc/errors.py."""
    inspected, specs = checked.inspected, rehearsal.specs
    kv_cache_dtype = config.cache.kv_cache_dtype
    if not checked.is_causal or inspected.probed.has_own_attention:
        return  # no cache, or heads that are known only after the load
    if kv_cache_dtype is not KVCacheDtype.AUTO:
        if any(spec.is_latent for spec in specs):
            raise UnsupportedModel(
                f"kv_cache_dtype {kv_cache_dtype}: {inspected.config.model_type} has multi-head"
                " latent attention, whose cache holds one row for all heads, in the model's type"
                " only"
            )
        if specs and not can_attend(specs, inspected.dtype, checked.device):
            raise UnsupportedModel(
                f"kv_cache_dtype {kv_cache_dtype} needs the native attention kernel, which does not"
                f" cover this model's heads in {_dtype_name(checked)}"
            )
    layout = _layout(checked, specs, config)
    if config.model.speculative_model is not None:
        group_without_window(layout.kv_groups())
    available_bytes = max_cache_bytes(checked.device, config)
    if inspected.probed.has_states:
        choose_num_state_blocks(
            available_bytes,
            state_bytes(inspected.probed.recurrent, inspected.dtype),
            max_num_seqs=config.scheduler.max_num_seqs,
            has_attention=bool(specs),
            num_speculative_tokens=config.scheduler.num_speculative_tokens,
            override=config.cache.num_state_blocks_override,
        )
    size_cache(
        available_bytes=available_bytes,
        block_bytes=block_bytes_of(specs, layout, inspected.dtype),
        layout=layout,
        model_len=inspected.model_len,
        max_model_len=config.model.max_model_len,
        num_blocks_override=config.cache.num_gpu_blocks_override,
    )


def _layout(checked: CheckedModel, specs: Sequence[LayerSpec], config: EngineConfig) -> KVLayout:
    return lay_out(
        specs,
        config.cache.block_size,
        config.scheduler.max_num_batched_tokens,
        config.model.max_model_len or checked.inspected.model_len,
        config.cache.enable_hybrid_kv_cache and config.parallel.pipeline_parallel_size == 1,
        format=FORMATS[config.cache.kv_cache_dtype],
        has_attention=checked.inspected.probed.has_attention,
        has_states=checked.inspected.probed.has_states,
    )


def _dtype_name(checked: CheckedModel) -> str:
    return str(checked.inspected.dtype).removeprefix("torch.")
