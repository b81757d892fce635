"""Loads a checkpoint directory, or raises the reason why it cannot be served.

Everything that is known without weights is checked before they are read: the configuration, and, by
running the model's own code on the meta device, its attention and the parameters that it uses.
"""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    PretrainedConfig,
    PreTrainedModel,
    modeling_utils,
)
from transformers.initialization import no_init_weights
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import logging as transformers_logging

from protocol.config import Quantization
from protocol.config.sentence_modules import SentenceModules
from protocol.sampling import PoolingType
from worker_proc.attention.interface import IMPLEMENTATION, paged_attention
from worker_proc.attention.probe import ProbedLayer, ProbedModel, is_within, probe_model
from worker_proc.errors import CheckpointError, InsufficientMemory, UnsupportedModel
from worker_proc.gguf.files import GgufFiles
from worker_proc.kv.kv_tensors import format_sizes
from worker_proc.loading.checkpoint import (
    DTYPES,
    check_config_files,
    check_stored_dtypes,
    describe_rejection,
    is_unused_buffer,
)
from worker_proc.loading.context import context_length
from worker_proc.loading.deferred_module import load_meta_kernels
from worker_proc.loading.frequencies import fix_frequencies
from worker_proc.loading.host_limits import available_memory
from worker_proc.loading.model_kind import ModelKind, model_kind, sentence_modules
from worker_proc.loading.plain_linears import make_linears_plain
from worker_proc.loading.pooling_model import (
    INNER,
    POOLER,
    PoolingModel,
    activate_dense_rows,
    drop_pooler,
    is_of_head,
)
from worker_proc.loading.proofs import proven
from worker_proc.loading.row_positions import give_positions
from worker_proc.loading.start_cache import StartCache
from worker_proc.loading.text_model import auto_class, building_without
from worker_proc.quantization.files import QuantizedFiles, WeightFiles
from worker_proc.quantization.formats import take_format
from worker_proc.quantization.headers import StoredTensor, read_headers
from worker_proc.quantization.model import load_quantized
from worker_proc.quantization.report import CodesReport
from worker_proc.quantization.scheme import CheckpointFormat
from worker_proc.recurrent.state_spec import RecurrentSpec
from worker_proc.runner import ReportProgress
from worker_proc.sampling.heads import DenseHead, Head, SequenceHead, check_dense

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
_ATTENTION_LAYER_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_RECURRENT_LAYER_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
_ROW_LAYER_TYPES = {"mlp", "moe"}
"""Layers that compute each row alone."""
_OPTIONS: dict[str, Any] = {
    "attn_implementation": IMPLEMENTATION,
    "local_files_only": True,
    "ignore_mismatched_sizes": True,  # they are reported by name
    "output_loading_info": True,
}
"""With which transformers loads a model, however its weights are read."""
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights, and the facts of its configuration."""

    model: PreTrainedModel | PoolingModel
    layers: list[ProbedLayer]  # attention layers, in the order in which the forward calls them
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    model_len: int  # longest context that the model can compute
    eos_token_ids: list[int]
    recurrent: list[RecurrentSpec] = field(default_factory=list)
    """Modules with a state, in the order in which the forward calls them."""
    codes: CodesReport | None = None
    """What becomes of the weights of a quantized checkpoint."""
    kind: ModelKind = ModelKind.GENERATES
    pooling: PoolingType = PoolingType.LAST
    """Of a classification head, or of requests that choose none."""
    head: Head | None = None
    """What follows the pooling."""
    has_own_attention: bool = False
    """Whether attention is in the model's own code, and is to be taken from there."""
    has_token_types: bool = False
    """Whether the two texts of a pair have tokens of different types."""

    @property
    def is_causal(self) -> bool:
        """Whether a token attends to those before it only; else a text is computed at once."""
        return not self.layers or self.layers[0].spec.is_causal


class InspectedModel(NamedTuple):
    """What the configuration alone states."""

    config: PretrainedConfig
    text_config: PretrainedConfig
    probed: ProbedModel
    model_len: int
    dtype: torch.dtype
    format: CheckpointFormat | None
    """Of a quantized checkpoint."""
    kind: ModelKind
    modules: SentenceModules


def load_model(
    directory: str,
    dtype: str,
    device: torch.device,
    progress: ReportProgress,
    proofs: StartCache | None = None,
    *,
    quantization: Quantization | None = None,
    settings_without_states: Sequence[str] = (),
    max_model_len: int | None = None,
) -> LoadedModel:
    """Load the checkpoint in `directory`, with weights of `dtype` ("auto": as stored).

    `quantization` is how its weights will be rounded, which must not be codes already. For
    `settings_without_states` and `max_model_len` see `inspect_config`.
    """
    progress("inspect", 0, 1)
    inspected = inspect_config(
        directory,
        dtype,
        device,
        proofs,
        quantization,
        settings_without_states=settings_without_states,
        max_model_len=max_model_len,
    )
    probed, torch_dtype = inspected.probed, inspected.dtype
    stored = read_headers(directory)
    files = None if inspected.format is None else _open(directory, stored, inspected.format)
    check_stored_dtypes(directory, stored if files is None else files.plain)
    if files is not None:
        keeps_codes = device.type == "cpu"
        num_bytes = probed.num_weights * torch_dtype.itemsize
        check_room(files.num_bytes(torch_dtype) if keeps_codes else num_bytes, device)
    progress("inspect", 1, 1)
    model = _load_weights(directory, inspected, stored, progress, device, files=files).to(device)
    _release_unused(model, probed.parameters)
    _ignore_padding(model)
    make_linears_plain(model)
    fix_frequencies(model, inspected.model_len)
    give_positions(model, probed.layers, inspected.model_len)
    model = model.eval().requires_grad_(False)
    loaded = LoadedModel(
        model=model,
        layers=probed.layers,
        dtype=torch_dtype,
        device=device,
        vocab_size=inspected.text_config.vocab_size,
        model_len=inspected.model_len,
        eos_token_ids=_eos_token_ids(model, inspected.text_config),
        codes=None if files is None else files.report,
        kind=inspected.kind,
        pooling=_pooling(inspected),
        has_own_attention=probed.has_own_attention,
        has_token_types=_has_token_types(inspected),
        recurrent=probed.recurrent,
    )
    return _with_head(loaded, model, directory, inspected)


def _open(directory: str, stored: dict[str, StoredTensor], format: CheckpointFormat) -> WeightFiles:
    """Check the headers of the files of a quantized checkpoint, and return its weights."""
    if format.source is not None:
        return GgufFiles(format.source)
    return QuantizedFiles(directory, stored, format)


def _pooling(inspected: InspectedModel) -> PoolingType:
    """Return the pooling of requests that choose none."""
    layers = inspected.probed.layers
    is_causal = not layers or layers[0].spec.is_causal
    return inspected.modules.pooling or (PoolingType.LAST if is_causal else PoolingType.CLS)


def _has_token_types(inspected: InspectedModel) -> bool:
    is_pooling = inspected.kind is not ModelKind.GENERATES
    return is_pooling and (getattr(inspected.config, "type_vocab_size", None) or 0) > 1


def _with_head(
    loaded: LoadedModel, model: PreTrainedModel, directory: str, inspected: InspectedModel
) -> LoadedModel:
    """Add what follows the pooling, and let a model without output layer return hidden states."""
    if inspected.kind is ModelKind.CLASSIFIES:
        head = SequenceHead(model)
        loaded = replace(loaded, head=head, pooling=head.pooling)
    elif inspected.modules.dense:
        dense = DenseHead(directory, inspected.modules.dense, loaded.device)
        loaded = replace(loaded, head=dense)
    if inspected.kind is ModelKind.GENERATES:
        return loaded
    if not loaded.is_causal:  # those of decoders are fused
        activate_dense_rows(model)
    layers = [replace(one, module_name=f"{INNER}.{one.module_name}") for one in loaded.layers]
    recurrent = [replace(one, module_name=f"{INNER}.{one.module_name}") for one in loaded.recurrent]
    wrapped = PoolingModel(model, inspected.probed.position_offset)
    return replace(loaded, model=wrapped.eval(), layers=layers, recurrent=recurrent)


def inspect_config(
    directory: str,
    dtype: str,
    device: torch.device,
    proofs: StartCache | None = None,
    quantization: Quantization | None = None,
    *,
    settings_without_states: Sequence[str] = (),
    max_model_len: int | None = None,
) -> InspectedModel:
    """Check everything that is known without weights; they need not be there.

    `settings_without_states` are those, with their values, that layers with a recurrent state
    exclude. `max_model_len` is the context that the engine asks for, if it asks for one.
    """
    check_config_files(directory)
    unknown = f"{directory}: transformers has no code of its own for this configuration"
    with _rejections(directory, unknown):
        config: PretrainedConfig = AutoConfig.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
    text_config = config.get_text_config(decoder=True)
    format = take_format(Path(directory) / "config.json", config)
    if format is not None and quantization is not None:
        raise UnsupportedModel(
            f"quantization {quantization}: {directory} is quantized already ({format.method});"
            " leave the setting out"
        )
    _check_config(config, text_config)
    kind = model_kind(config)
    modules = sentence_modules(directory, kind)
    check_dense(modules.dense, text_config.hidden_size)
    probed = proven(proofs, "probe", ProbedModel, lambda: _probe(directory, config))
    if probed.recurrent and (reason := _why_no_states(device, settings_without_states)):
        raise UnsupportedModel(f"{config.model_type}: layers with a recurrent state {reason}")
    has_codes = format is not None and format.source is None  # those of GGUF state bfloat16
    torch_dtype = _resolve_dtype(dtype, config, device, is_quantized=has_codes)
    if format is None:
        check_room(probed.num_weights * torch_dtype.itemsize, device)
    elif kind is ModelKind.CLASSIFIES:
        raise UnsupportedModel(
            f"{config.model_type}: a classification head in a checkpoint that is quantized"
            f" ({format.method})"
        )
    model_len = context_length(
        text_config, has_attention=bool(probed.layers), max_model_len=max_model_len
    )
    model_len -= probed.position_offset
    model_len = min(model_len, modules.max_seq_length or model_len)
    return InspectedModel(
        config, text_config, probed, model_len, torch_dtype, format, kind, modules
    )


def _why_no_states(device: torch.device, settings: Sequence[str]) -> str:
    """Return why layers with a recurrent state cannot be computed, if they cannot."""
    if device.type != "cpu":
        return f"are computed on the CPU only, not on {device.type}"
    return f"exclude {settings[0]}; leave the setting out" if settings else ""


def _probe(directory: str, config: PretrainedConfig) -> ProbedModel:
    """Build the model without memory, and run it."""
    model = _build_skeleton(directory, config)
    fix_frequencies(model, None)
    text_config = config.get_text_config(decoder=True)
    layer_types = getattr(text_config, "layer_types", None) or ()
    num_row_layers = sum(layer_type in _ROW_LAYER_TYPES for layer_type in layer_types)
    has_output_layer = model_kind(config) is ModelKind.GENERATES
    num_layers = text_config.num_hidden_layers - num_row_layers
    return probe_model(model, num_layers, has_output_layer=has_output_layer)


def _build_skeleton(directory: str, config: PretrainedConfig) -> PreTrainedModel:
    """Build the model without memory."""
    load_meta_kernels()
    no_model = f"{config.model_type}: no causal language model"
    with _rejections(directory, no_model), torch.device("meta"), no_init_weights():
        own_config = copy.deepcopy(config)  # the probe changes it
        model = auto_class(config).from_config(own_config, trust_remote_code=False)
        if model_kind(config) is ModelKind.EMBEDS:
            drop_pooler(model)
    model.tie_weights()  # which is left out where weights are not initialized
    _ignore_padding(model)
    return cast(PreTrainedModel, model.eval())


def _ignore_padding(model: PreTrainedModel) -> None:
    """Keep models from looking for padding in ids, which packed rows do not have."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None


def check_room(num_bytes: int, device: torch.device) -> None:
    """Raise InsufficientMemory if the weights alone do not fit in the memory that is free."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    if num_bytes > free:
        needed, there = format_sizes(num_bytes, free)
        raise InsufficientMemory(
            f"the weights need {needed} of memory, and {there} are free ({device.type}); free some,"
            " or choose a smaller model or dtype"
        )


@contextmanager
def _rejections(directory: str, unsupported: str) -> Iterator[None]:
    """Raise what transformers rejects, as unsupported or as a wrong configuration."""
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
    if strange := layer_types - known:
        raise UnsupportedModel(f"{config.model_type}: layers of type {', '.join(sorted(strange))}")


def _resolve_dtype(
    name: str, config: PretrainedConfig, device: torch.device, *, is_quantized: bool
) -> torch.dtype:
    """Return the type to compute in; "auto": as in config.json, and bfloat16 for float32."""
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


def _load_weights(
    directory: str,
    inspected: InspectedModel,
    stored: dict[str, StoredTensor],
    progress: ReportProgress,
    device: torch.device,
    *,
    files: WeightFiles | None = None,
) -> PreTrainedModel:
    ALL_ATTENTION_FUNCTIONS.register(IMPLEMENTATION, paged_attention)
    unused_modules: tuple[str, ...] = inspected.probed.unused_modules
    if inspected.kind is ModelKind.EMBEDS:
        unused_modules += (POOLER,)
    try:
        with (
            _reported(progress),
            _straight_to(device) as placement,
            building_without(unused_modules),
        ):
            read = _reader(directory, inspected, files, device)
            try:
                model, info = read(_OPTIONS | placement)
            except NotImplementedError:  # a module computes something while it is built
                load_meta_kernels()
                model, info = read(_OPTIONS | placement)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(f"{directory}: {error}") from error
    problems = [f"misses {key}" for key in sorted(info["missing_keys"])]
    problems += [f"has another shape of {key}" for key in sorted(map(str, info["mismatched_keys"]))]
    is_tied = "lm_head.weight" in model.all_tied_weights_keys
    problems += [
        f"has {key}, which {model.config.model_type} does not use"
        for key in sorted(info["unexpected_keys"])
        if not is_unused_buffer(key, stored.get(key))
        and not is_within(key, unused_modules)
        and not (is_tied and key.endswith("lm_head.weight"))
        and not (inspected.kind is ModelKind.EMBEDS and is_of_head(key, model))
    ]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise CheckpointError(f"{directory} {', '.join(problems[:3])}{more}")
    return model


def _reader(
    directory: str, inspected: InspectedModel, files: WeightFiles | None, device: torch.device
) -> Callable[[dict[str, Any]], tuple[PreTrainedModel, dict[str, Any]]]:
    """Return what loads a model with options of transformers.

    It returns the names of weights that have not been loaded, too.
    """
    if files is None:
        return partial(_from_pretrained, directory, inspected)
    skeleton = _build_skeleton(directory, inspected.config)
    load = partial(load_quantized, skeleton, directory, files, inspected.dtype)
    return partial(load, keeps_codes=device.type == "cpu")


def _from_pretrained(
    directory: str, inspected: InspectedModel, options: dict[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    if inspected.probed.has_own_attention:  # which has forms by transformers' names only
        options = options | {"attn_implementation": "eager"}
    model, info = auto_class(inspected.config).from_pretrained(
        directory,
        dtype=inspected.dtype,
        trust_remote_code=False,
        use_safetensors=True,
        **options,
    )
    return model, info


def _release_unused(model: PreTrainedModel, used: frozenset[str]) -> None:
    """Move parameters that the forward does not use to meta: frees them, and any use fails."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    kept = {parameters[name].untyped_storage()._cdata for name in used}
    for name, parameter in parameters.items():
        if parameter.untyped_storage()._cdata not in kept:
            path, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(path), leaf, nn.Parameter(parameter.to("meta")))


@contextmanager
def _straight_to(device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield arguments with which each weight is read to `device`, never all of them to the host.

    For one device transformers needs nothing of `accelerate`; its check asks for it all the same.
    """
    check = getattr(modeling_utils, "check_and_set_device_map", None)
    if device.type == "cpu" or check is None:
        yield {}
        return
    modeling_utils.check_and_set_device_map = lambda device_map: device_map
    try:
        yield {"device_map": {"": device}}
    finally:
        modeling_utils.check_and_set_device_map = check


@contextmanager
def _reported(progress: ReportProgress) -> Iterator[None]:
    """Connect transformers' progress bar over the weights to `progress`, and print nothing."""

    def iterate(items: Any) -> Iterator[Any]:
        total = len(items)
        for done, item in enumerate(items):
            progress("load_weights", done, total)
            yield item
        progress("load_weights", total, total)

    def hook(factory: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args and hasattr(args[0], "__len__"):
            return iterate(args[0])
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
    eos = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if eos is None:
        eos = getattr(text_config, "eos_token_id", None)
    ids = eos if isinstance(eos, list) else [eos]
    return [token_id for token_id in ids if token_id is not None and token_id >= 0]
