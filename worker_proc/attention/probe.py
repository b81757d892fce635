"""Finds out which attention a model computes, by running its code on the meta device.

The model's own forward is called once, as it will be served, without weights or memory. All
attention calls, masks and parameters that it uses are recorded, so that each layer's attention is
observed instead of guessed from names in `config.json`. A model that paged attention cannot compute
is rejected before weights are read. Code cannot branch on values on the meta device, so the
parameters that one forward uses are those that every forward over text uses.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from worker_proc.attention.compression import Compression, take_compressors
from worker_proc.attention.indexers import choose_all, indexers_of
from worker_proc.attention.interface import has_own_attention
from worker_proc.attention.probed_layer import ProbedLayer
from worker_proc.attention.recorder import NUM_PROBE_TOKENS, Recorder
from worker_proc.attention.recording import recording
from worker_proc.attention.score_terms import (
    distance_terms_of,
    modules_with_terms,
    take_score_terms,
)
from worker_proc.attention.stand_ins import OwnCache
from worker_proc.errors import UnsupportedModel, describe
from worker_proc.recurrent.cache_argument import CACHE
from worker_proc.recurrent.recording import recorded_states
from worker_proc.recurrent.state_spec import RecurrentSpec


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """The layers, parameters and modules that a forward over one packed row of tokens uses."""

    layers: list[ProbedLayer]  # in call order
    parameters: frozenset[str]
    unused_modules: tuple[str, ...]  # topmost modules that use none of their parameters
    num_weights: int  # number of parameter elements in all other modules
    recurrent: list[RecurrentSpec] = field(default_factory=list)
    """Modules with a recurrent state, in call order."""
    position_offset: int = 0  # position id of a text's first token
    has_own_attention: bool = False
    """True if the model's own code computes attention. Its windows, biases and repeated heads,
    which depend on values, are observed when the weights are loaded."""
    read_linears: tuple[str, ...] = ()
    """Linear layers that are not called: other modules' code computes with their weights."""
    has_attention: bool = True
    """True if the model has attention layers; a pipeline stage may have none."""
    has_states: bool = False
    """True if the model has modules with a recurrent state; a pipeline stage may have none."""
    num_outputs: dict[str, int] = field(default_factory=dict)
    """The number of outputs of each listed module that returns a tuple, by name."""
    indexed_length: int | None = None
    """The longest text of which indexers choose all tokens (indexers.py); None: no indexers."""
    num_logits: int | None = None
    """The number of logits for each row; some models omit those of padding tokens."""
    masked_length: int | None = None
    """The longest text in which no key bias hides a token; None: there are no key biases."""
    cached_length: int | None = None
    """The longest text of which transformers' cache keeps all that attention sees; None: any."""
    row_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """The row shapes that modules with 2-D matrices take, by name, without the text dimensions."""
    argument_shapes: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    """The argument shapes of modules with 3-D matrices, by name; 0 stands for the number of
    rows."""


def probe_model(
    model: PreTrainedModel, num_layers: int, *, has_output_layer: bool = True
) -> ProbedModel:
    """Run `model`, which is on the meta device, and return what it used.

    Raises UnsupportedModel if the forward fails, or if it does not have `num_layers` self-attention
    layers that either call transformers' attention interface or whose own code computes only
    attention. The layers of a model with an output layer must be causal; in other models all layers
    must have the same direction.
    """
    recorder = Recorder(model)
    model_type = model.config.model_type
    indexed_length = choose_all(model)
    masked_length = take_score_terms(model)
    compressions = take_compressors(model)
    _add_replaced_parameters(model, recorder, compressions)
    is_own = has_own_attention(model)
    with (
        recording(model, recorder, is_own=is_own),
        recorded_states(model, recorder.storages.add) as recurrent,
        torch.inference_mode(),
        recorder.storages,
    ):
        cache = OwnCache(recorder.own_attention) if is_own else None
        output = _run_forward(model, cache, has_output_layer=has_output_layer)
    layers = recorder.compressed_layers() if compressions else recorder.layers
    _check_directions(layers, model_type, has_output_layer=has_output_layer)
    num_reached = num_layers - _num_passed_over(model, num_layers, recorder.called)
    _check_layers(layers, recurrent, model_type, num_reached)
    used = _used_parameters(model, recorder)
    unused_modules = _top_modules_without(model, used, recorder.called)
    return ProbedModel(
        layers=layers,
        parameters=used,
        unused_modules=unused_modules,
        num_weights=_num_weights(model, unused_modules),
        recurrent=recurrent,
        position_offset=0 if has_output_layer else position_offset(model),
        has_own_attention=is_own and bool(layers),
        read_linears=_read_linears(model, used, recorder, recurrent),
        has_attention=bool(layers),
        has_states=bool(recurrent),
        num_outputs=_num_outputs(model, recorder.num_outputs),
        indexed_length=indexed_length,
        masked_length=masked_length,
        num_logits=output.logits.shape[-1] if has_output_layer else None,
        row_shapes=recorder.row_shapes,
        argument_shapes=recorder.argument_shapes,
    )


def _add_replaced_parameters(
    model: nn.Module, recorder: Recorder, compressions: Collection[Compression]
) -> None:
    """Count parameters as used that the worker reads in place of the model's own code."""
    for _, module in modules_with_terms(model):  # the served forward reads these weights
        terms = distance_terms_of(module)
        recorder.storages.add([] if terms is None else terms.child.parameters())
    for compression in compressions:  # the kernel computes with these
        recorder.storages.add(compression.used_parameters())
    for _, indexer in indexers_of(model):  # the comparison with its own forward uses them
        recorder.storages.add(indexer.parameters())


def _run_forward(model: PreTrainedModel, cache: OwnCache | None, *, has_output_layer: bool) -> Any:
    """Return the output for a packed row of tokens; raise UnsupportedModel if that fails."""
    tokens = torch.zeros(1, NUM_PROBE_TOKENS, dtype=torch.long, device="meta")
    kept = tokens[0]  # all rows; given a number, some models skip rows in the last layers
    options: dict[str, Any] = {"logits_to_keep": kept} if has_output_layer else {}
    if cache is not None:
        options[CACHE] = cache
    failed = f"the model type {model.config.model_type} is not supported"
    try:
        return model(input_ids=tokens, position_ids=tokens, use_cache=False, **options)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{failed}: {error}") from error
    except Exception as error:
        raise UnsupportedModel(
            f"{failed}: its forward over one row of tokens with positions fails ({describe(error)})"
        ) from error


def _num_outputs(model: nn.Module, counts: Mapping[nn.Module, int]) -> dict[str, int]:
    """Return the output counts of modules in ModuleLists, by name."""
    return {
        f"{prefix}.{index}": counts[module]
        for prefix, modules in model.named_modules()
        if isinstance(modules, nn.ModuleList)
        for index, module in enumerate(modules)
        if module in counts
    }


def position_offset(model: PreTrainedModel) -> int:
    """Return the position id of a text's first token in a model without an output layer.

    Models whose positions start after the padding token's number have a method for it.
    """
    embeddings: Any = getattr(model.base_model, "embeddings", None)
    if not hasattr(embeddings, "create_position_ids_from_input_ids"):
        return 0
    return int(embeddings.padding_idx) + 1


def _used_parameters(model: nn.Module, recorder: Recorder) -> frozenset[str]:
    """Return the names of the parameters that were used, all names of shared ones."""
    parameters = model.named_parameters(remove_duplicate=False)
    return frozenset(name for name, each in parameters if recorder.storages.holds(each))


def _num_weights(model: nn.Module, unused_modules: Collection[str]) -> int:
    """Return the number of parameter elements outside `unused_modules`; shared ones count once."""
    parameters = model.named_parameters(remove_duplicate=False)
    built = {id(each): each for name, each in parameters if not is_within(name, unused_modules)}
    return sum(each.numel() for each in built.values())


def _read_linears(
    model: nn.Module,
    used: Collection[str],
    recorder: Recorder,
    recurrent: Collection[RecurrentSpec],
) -> tuple[str, ...]:
    """Return the linear layers that are used but not called.

    Those of indexers, recurrent modules and experts are left out.
    """
    names = {module: name for name, module in model.named_modules()}
    elsewhere = [names[indexer] for _, indexer in indexers_of(model)]
    elsewhere += [*(spec.module_name for spec in recurrent), *recorder.experts_names]
    linears = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
    multiplied = {id(module.weight) for module in linears.values() if module in recorder.called}
    return tuple(
        name
        for name, module in linears.items()
        if f"{name}.weight" in used
        and id(module.weight) not in multiplied
        and not is_within(name, elsewhere)
    )


def _num_passed_over(model: nn.Module, num_layers: int, called: Collection[nn.Module]) -> int:
    """Return the number of decoder layers that text does not reach, such as layers for images."""
    lists = (module for module in model.modules() if isinstance(module, nn.ModuleList))
    counts = (
        sum(layer not in called for layer in layers)
        for layers in lists
        if len(layers) == num_layers and any(layer in called for layer in layers)
    )
    return max(counts, default=0)


def _check_layers(
    layers: Collection[ProbedLayer],
    recurrent: Collection[RecurrentSpec],
    model_type: str,
    num_layers: int,
) -> None:
    """Raise UnsupportedModel unless each of `num_layers` layers attends or has a state."""
    if len({spec.module_name for spec in recurrent}) != len(recurrent):
        raise UnsupportedModel(f"{model_type}: one recurrent module is used by several layers")
    num_mixing = len(layers) + len(recurrent)
    # Several layers may share a module, and a module may attend several times in one layer.
    is_module_each = len({layer.module_name for layer in layers}) == num_layers
    has_others = num_mixing > num_layers and not is_module_each and not recurrent
    if num_mixing < num_layers or has_others:
        raise UnsupportedModel(
            f"{model_type}: {num_mixing} of {num_layers} layers call the attention"
            " interface, or the functions of recurrent layers; the others mix tokens in another"
            " way (linear, convolutional or their own attention)"
        )


def _check_directions(
    layers: Collection[ProbedLayer], model_type: str, *, has_output_layer: bool
) -> None:
    """Raise UnsupportedModel unless all layers are causal, or none in a model that only pools."""
    others = [layer for layer in layers if not layer.spec.is_causal]
    if others and has_output_layer:
        raise UnsupportedModel(f"{model_type}: {others[0].module_name} is not causal")
    if others and len(others) < len(layers):
        raise UnsupportedModel(f"{model_type}: only some of its attention layers are causal")
    for layer in others:
        if layer.sinks is not None or layer.spec.kv_source is not None:
            raise UnsupportedModel(
                f"{model_type}: {layer.module_name} is not causal, and has attention sinks or the"
                " keys and values of another layer"
            )


def _top_modules_without(
    model: PreTrainedModel, used: Collection[str], called: Collection[nn.Module]
) -> tuple[str, ...]:
    """Return the names of the topmost modules that have parameters and are not used.

    None of their parameters is in `used`, and their forward was not called.
    """
    used_modules = {""}
    names = [*used, *(f"{name}." for name, module in model.named_modules() if module in called)]
    for name in names:
        parts = name.split(".")
        used_modules.update(".".join(parts[:length]) for length in range(1, len(parts)))
    return tuple(
        name
        for name, module in model.named_modules(remove_duplicate=False)
        if name not in used_modules
        and name.rpartition(".")[0] in used_modules
        and next(module.parameters(), None) is not None
    )


def is_within(name: str, modules: Collection[str]) -> bool:
    """Return whether a tensor belongs to one of `modules`, given its name."""
    return any(name.startswith(f"{module}.") for module in modules)
