"""Loads a checkpoint directory, or raises the reason why it cannot be served.

Everything that does not depend on weights is checked before they are read: the findings of
inspection.py, the file headers and, by loading the model on the meta device, the names and shapes
of its tensors.
"""

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from protocol.sampling import PoolingType
from worker_proc.attention.compression import take_compressors
from worker_proc.attention.indexers import choose_all
from worker_proc.attention.interface import IMPLEMENTATION, paged_attention, set_implementation
from worker_proc.attention.probe import is_within
from worker_proc.attention.probed_layer import are_causal
from worker_proc.attention.score_terms import take_score_terms
from worker_proc.attention.within_tokens import attend_in_tokens
from worker_proc.errors import CheckpointError, unsupported_failures
from worker_proc.gguf.files import GgufFiles
from worker_proc.loading.checkpoint import INDEX_DTYPES, check_stored_dtypes, is_unused_buffer
from worker_proc.loading.deferred_module import load_meta_kernels
from worker_proc.loading.dense_activations import activate_dense_rows
from worker_proc.loading.end_tokens import end_tokens
from worker_proc.loading.frequencies import fix_frequencies
from worker_proc.loading.inspection import (
    InspectedModel,
    build_skeleton,
    check_room,
    ignore_padding,
    inspect_config,
)
from worker_proc.loading.kept_rows import keep_rows
from worker_proc.loading.load_contexts import reported, straight_to
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.model_kind import ModelKind
from worker_proc.loading.plain_linears import keep_read, make_linears_plain
from worker_proc.loading.pooling_model import (
    INNER,
    POOLER,
    PoolingModel,
    is_of_head,
)
from worker_proc.loading.rescaled_layers import rescale
from worker_proc.loading.row_positions import give_positions, give_positions_of_rows
from worker_proc.loading.start_cache import StartCache
from worker_proc.loading.text_model import auto_class, is_of_other_part
from worker_proc.loading.unbuilt_parts import building_without, without_libraries
from worker_proc.loading.uncached_attention import route_uncached
from worker_proc.native.kernels import NATIVE_DTYPES
from worker_proc.quantization.files import QuantizedFiles
from worker_proc.quantization.formats import is_quantized
from worker_proc.quantization.headers import StoredTensor, read_headers, read_object
from worker_proc.quantization.model import load_quantized, load_state
from worker_proc.quantization.scheme import CheckpointFormat
from worker_proc.quantization.weight_files import WeightFiles
from worker_proc.runner import ReportProgress
from worker_proc.sampling.heads import DenseHead, SequenceHead

_OPTIONS: dict[str, Any] = {
    "attn_implementation": "eager",  # towers may support only transformers' own names
    "local_files_only": True,
    "ignore_mismatched_sizes": True,  # reported by name
    "output_loading_info": True,
}
"""Options for loading a model through transformers, however its weights are read."""
_Read = Callable[[dict[str, Any]], tuple[PreTrainedModel, dict[str, Any]]]
"""Loads a model with options for transformers; returns it with its loading info."""


class CheckedModel(NamedTuple):
    """A model before its weights are read; only the headers of its files have been."""

    directory: str
    device: torch.device
    inspected: InspectedModel
    stored: dict[str, StoredTensor]
    files: WeightFiles | None
    """The weight files of a quantized checkpoint; None: it is not quantized."""
    dense: DenseHead | None
    """Dense layers after the pooling, whose few weights are already loaded."""

    @property
    def is_causal(self) -> bool:
        """True if a token attends to preceding ones only, as in `LoadedModel`."""
        return are_causal(self.inspected.probed.layers)

    @property
    def num_bytes(self) -> int:
        """The memory for the weights, in bytes, unless they are rounded at load."""
        dtype = self.inspected.dtype
        if self.files is not None and self.device.type == "cpu" and dtype in NATIVE_DTYPES:
            return self.files.num_bytes(dtype)  # codes are kept
        return self.inspected.probed.num_weights * dtype.itemsize

    def on_host(self) -> "CheckedModel":
        """Return the model, to be loaded to host memory, which maps its files."""
        return self._replace(device=torch.device("cpu"))


def check_model(
    directory: str,
    dtype: str,
    device: torch.device,
    progress: ReportProgress,
    proofs: StartCache | None = None,
    *,
    max_model_len: int | None = None,
    other_bytes: int = 0,
    num_ranks: int = 1,
) -> CheckedModel:
    """Check the configuration and the headers of a checkpoint, for weights of `dtype`.

    "auto" stands for the stored dtype. See `inspect_config` for the keywords. `rehearse` finds
    tensors that are missing from the headers.
    """
    progress("inspect", 0, 1)
    inspected = inspect_config(
        directory,
        dtype,
        device,
        proofs,
        max_model_len=max_model_len,
        other_bytes=other_bytes,
        num_ranks=num_ranks,
    )
    stored = read_headers(directory)
    if not stored and (inspected.format is None or not inspected.format.sources):
        raise CheckpointError(f"{directory} holds no model.safetensors, or an empty one")
    files = None if inspected.format is None else _open(directory, stored, inspected.format)
    check_stored_dtypes(directory, stored if files is None else files.plain)
    layers = inspected.modules.dense
    dense = DenseHead(directory, layers, device) if layers else None
    checked = CheckedModel(directory, device, inspected, stored, files, dense)
    if files is not None:
        check_room(checked.num_bytes, device, other_bytes)
    progress("inspect", 1, 1)
    return checked


def rehearse(checked: CheckedModel) -> PreTrainedModel:
    """Load a model on the meta device, with the names and shapes of its weights but no values.

    Index tensors are left out, so that a weight that is stored as one counts as missing. Raises
    CheckpointError for tensors that are missing, misshapen or unused.
    """
    directory, _, inspected, stored, files, _ = checked
    meta, dtype = torch.device("meta"), inspected.dtype
    shapes: dict[str, Sequence[int]] = {}
    plain = stored if files is None else files.plain
    shapes |= {
        name: tensor.shape for name, tensor in plain.items() if tensor.dtype not in INDEX_DTYPES
    }
    if files is not None:
        shapes |= {name: weight.shape for name, weight in files.weights.items()}
        shapes |= {name: whole.shape for name, whole in files.whole.items()}
    tensors = {
        name: torch.empty(tuple(shape), dtype=dtype, device=meta) for name, shape in shapes.items()
    }
    with unsupported_failures(inspected.config.model_type):
        skeleton = build_skeleton(directory, inspected.config)
        read = partial(load_state, skeleton, tensors, dtype)
        return _load_weights(checked._replace(device=meta), read, _report_nothing)


def load_checked(
    checked: CheckedModel, progress: ReportProgress, tokenizer: str | None = None
) -> LoadedModel:
    """Read the weights of a model that was rehearsed, now or at an earlier start.

    `tokenizer` is the directory of the tokenizer, if it is not that of the model.
    """
    device, inspected, files = checked.device, checked.inspected, checked.files
    probed = inspected.probed
    model = _load_weights(checked, _reader(checked), progress).to(device)
    _release_unused(model, probed.parameters)
    ignore_padding(model)
    keep_rows(model)
    route_uncached(model)
    attend_in_tokens(model)
    choose_all(model)
    take_compressors(model)
    take_score_terms(model)
    make_linears_plain(model)
    keep_read(model, probed.read_linears)
    fix_frequencies(model, inspected.model_len)
    give_positions(model, probed.layers, inspected.model_len)
    give_positions_of_rows(model, probed.layers)
    model = model.eval().requires_grad_(False)
    rescale(model)
    vocab_size = inspected.text_config.vocab_size
    if probed.num_logits:
        vocab_size = min(vocab_size, probed.num_logits)
    configured = _configured_eos(model, inspected.text_config)
    loaded = LoadedModel(
        model=model,
        layers=probed.layers,
        dtype=inspected.dtype,
        device=device,
        vocab_size=vocab_size,
        model_len=inspected.model_len,
        eos_token_ids=end_tokens(tokenizer or checked.directory, configured, vocab_size),
        codes=None if files is None else files.report,
        kind=inspected.kind,
        pooling=_pooling(inspected),
        has_own_attention=probed.has_own_attention,
        has_token_types=_has_token_types(inspected),
        recurrent=probed.recurrent,
        has_attention=probed.has_attention,
        has_states=probed.has_states,
        row_shapes=probed.row_shapes,
        argument_shapes=probed.argument_shapes,
    )
    return _with_head(loaded, model, checked)


def _report_nothing(phase: str, done: int, total: int) -> None:
    """Ignore a progress report."""


def _open(directory: str, stored: dict[str, StoredTensor], format: CheckpointFormat) -> WeightFiles:
    """Check the file headers of a quantized checkpoint, and return its weight files."""
    if format.sources:
        return GgufFiles(format.sources)
    return QuantizedFiles(directory, stored, format)


def _pooling(inspected: InspectedModel) -> PoolingType:
    """Return the pooling of requests that do not choose one."""
    is_causal = are_causal(inspected.probed.layers)
    return inspected.modules.pooling or (PoolingType.LAST if is_causal else PoolingType.CLS)


def _has_token_types(inspected: InspectedModel) -> bool:
    """Return whether tokens have types: in encoders, and in those that are made decoders."""
    return (getattr(inspected.config, "type_vocab_size", None) or 0) > 1


def _with_head(loaded: LoadedModel, model: PreTrainedModel, checked: CheckedModel) -> LoadedModel:
    """Add the head after pooling; a model without an output layer returns hidden states."""
    inspected = checked.inspected
    if inspected.kind is ModelKind.CLASSIFIES:
        head = SequenceHead(model)
        loaded = replace(loaded, head=head, pooling=head.pooling)
    elif checked.dense is not None:
        loaded = replace(loaded, head=checked.dense)
    if inspected.kind is ModelKind.GENERATES:
        return loaded
    if not loaded.is_causal:  # decoders' activations are fused
        activate_dense_rows(model)
    layers = [replace(one, module_name=f"{INNER}.{one.module_name}") for one in loaded.layers]
    recurrent = [replace(one, module_name=f"{INNER}.{one.module_name}") for one in loaded.recurrent]
    row_shapes = {f"{INNER}.{name}": shape for name, shape in loaded.row_shapes.items()}
    stacks = {f"{INNER}.{name}": shapes for name, shapes in loaded.argument_shapes.items()}
    wrapped = PoolingModel(model, inspected.probed.position_offset)
    return replace(
        loaded,
        model=wrapped.eval(),
        layers=layers,
        recurrent=recurrent,
        row_shapes=row_shapes,
        argument_shapes=stacks,
    )


def _load_weights(checked: CheckedModel, read: _Read, progress: ReportProgress) -> PreTrainedModel:
    """Return the model that `read` loads.

    Raises CheckpointError if tensors are missing, misshapen or unused.
    """
    directory, device, inspected, *_ = checked
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, paged_attention)
    unused_modules: tuple[str, ...] = inspected.probed.unused_modules
    if inspected.kind is ModelKind.EMBEDS:
        unused_modules += (POOLER,)
    try:
        with (
            reported(progress),
            straight_to(device) as placement,
            building_without(unused_modules),
        ):
            options = _OPTIONS | placement
            try:
                model, info = without_libraries(partial(read, options))
            except NotImplementedError:  # a module computes something while it is built
                load_meta_kernels()
                model, info = without_libraries(partial(read, options))
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: {error}") from error
    problems = _problems(checked, model, info, unused_modules)
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"{directory} {', '.join(problems[:3])}{more}")
    if not inspected.probed.has_own_attention:
        set_implementation(model, IMPLEMENTATION)
    return model


def _problems(
    checked: CheckedModel,
    model: PreTrainedModel,
    info: dict[str, Any],
    unused_modules: Collection[str],
) -> list[str]:
    """Return the missing, misshapen and unused tensors of a checkpoint, in words.

    `info` is transformers' report of the load.
    """
    inspected, stored = checked.inspected, checked.stored
    missing = set(info["missing_keys"])
    if checked.device.type == "meta":
        missing -= {name for name, one in model.named_buffers() if not one.is_floating_point()}
    problems = [f"misses {key}" for key in sorted(missing)]
    problems += [f"has another shape of {key}" for key in sorted(map(str, info["mismatched_keys"]))]
    is_tied = "lm_head.weight" in model.all_tied_weights_keys
    problems += [
        f"has {key}, which {model.config.model_type} does not use"
        for key in sorted(info["unexpected_keys"])
        if not is_unused_buffer(key, stored.get(key))
        and not is_within(key, unused_modules)
        and not (key in stored and is_of_other_part(key, inspected.config))
        and not (is_tied and key.endswith("lm_head.weight"))
        and not (inspected.kind is ModelKind.EMBEDS and is_of_head(key, model))
    ]
    return problems


def _reader(checked: CheckedModel) -> _Read:
    """Return a function that reads the weights of a model."""
    directory, device, inspected, _, files, _ = checked
    if files is None:
        return partial(_from_pretrained, directory, inspected)
    skeleton = build_skeleton(directory, inspected.config)
    load = partial(load_quantized, skeleton, directory, files, inspected.dtype)
    return partial(load, keeps_codes=device.type == "cpu")


def _from_pretrained(
    directory: str, inspected: InspectedModel, options: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    states_format = is_quantized(directory)  # which `take_format` has removed: weights are plain
    stated = read_object(Path(directory) / "config.json").get("model_type")
    if states_format or stated != inspected.config.model_type:  # transformers reads another one
        options = options | {"config": copy.deepcopy(inspected.config)}
    model, info = auto_class(inspected.config).from_pretrained(
        directory,
        dtype=inspected.dtype,
        trust_remote_code=False,
        use_safetensors=True,
        **options,
    )
    return model, info


def _release_unused(model: PreTrainedModel, used: frozenset[str]) -> None:
    """Move unused parameters to the meta device, which frees them and makes any use fail."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kept = {parameters[name].untyped_storage()._cdata for name in used}
    for name, parameter in parameters.items():
        if parameter.untyped_storage()._cdata not in kept:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(parameter.to("meta")))


def _configured_eos(model: PreTrainedModel, text_config: PretrainedConfig) -> object:
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    return getattr(text_config, "eos_token_id", None) if eos is None else eos
