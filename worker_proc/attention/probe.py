"""Finds out what attention a model computes, by running its code on the meta device.

The model's own forward is called once, as it is served, without weights or memory. All attention
calls, masks and parameters that it uses are recorded, so that the attention of each layer is
observed, not guessed from names in `config.json`. A model that paged attention cannot compute is
rejected before weights are read. Code cannot branch on values of the meta device, so the parameters
that one forward uses are those of every forward over text.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from worker_proc.attention.compression import take_compressors
from worker_proc.attention.indexers import choose_all, indexers_of
from worker_proc.attention.interface import has_own_attention
from worker_proc.attention.recorder import NUM_PROBE_TOKENS, ProbedLayer, Recorder
from worker_proc.attention.recording import recording
from worker_proc.attention.score_terms import (
    distance_terms_of,
    modules_with_terms,
    take_score_terms,
)
from worker_proc.attention.stand_ins import OwnCache
from worker_proc.errors import UnsupportedModel, describe
from worker_proc.recurrent.recording import recorded_states
from worker_proc.recurrent.state_spec import RecurrentSpec


@dataclass(frozen=True, slots=True)
class ProbedModel:
    """What the forward over one packed row of tokens uses."""

    layers: list[ProbedLayer]  # in the order in which the forward calls them
    parameters: frozenset[str]
    unused_modules: tuple[str, ...]  # topmost ones, of whose parameters it uses none
    num_weights: int  # in the parameters of all other modules
    recurrent: list[RecurrentSpec] = field(default_factory=list)
    """Modules with a state, in the order in which the forward calls them."""
    position_offset: int = 0  # number of a text's first position
    has_own_attention: bool = False
    """Whether attention is in the model's own code. Windows, biases and repeated heads, which
    depend on values there, are observed when its weights are loaded."""
    read_linears: tuple[str, ...] = ()
    """Linear layers that are not called: the code of other modules computes with their weights."""
    has_attention: bool = True
    """Whether there are attention layers; a stage may have none of them."""
    has_states: bool = False
    """Whether there are modules with a state; a stage may have none of them."""
    num_outputs: dict[str, int] = field(default_factory=dict)
    """How many outputs the modules in lists have, of those that return several."""
    indexed_length: int | None = None
    """Of texts whose tokens are all chosen by indexers, if there are some (indexers.py)."""
    num_logits: int | None = None
    """Of a row; some models leave out those of tokens that only fill up a vocabulary."""
    masked_length: int | None = None
    """Of texts none of whose tokens is hidden for its key's bias, if keys have some."""
    row_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """What modules with matrices of their own take, by name, without the dimensions of texts."""
    argument_shapes: dict[str, dict[str, tuple[int, ...]]] = field(default_factory=dict)
    """What modules with stacks of matrices take, by argument; 0 is the number of rows."""


def probe_model(
    model: PreTrainedModel, num_layers: int, *, has_output_layer: bool = True
) -> ProbedModel:
    """Run `model`, which is on the meta device, and return what it used.

    UnsupportedModel: the forward fails, or holds something other than `num_layers`
    self-attention layers that go through transformers' attention interface, or whose own code
    does no more than attention. They must be causal in a model with an output layer, and all alike
    in that in another one.
    """
    recorder = Recorder(model)
    config = model.config
    indexed_length = choose_all(model)
    terms_length = take_score_terms(model)
    for _, module in modules_with_terms(model):  # what the served forward takes from children
        terms = distance_terms_of(module)
        recorder.storages.add([] if terms is None else terms.child.parameters())
    compressions = take_compressors(model)
    for compression in compressions:  # the kernel computes with these
        recorder.storages.add(compression.used_parameters())
    for _, indexer in indexers_of(model):  # which the comparison with its own forward computes
        recorder.storages.add(indexer.parameters())
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
    _check_directions(layers, config.model_type, has_output_layer=has_output_layer)
    num_reached = num_layers - _num_passed_over(model, num_layers, recorder.called)
    _check_layers(layers, recurrent, config.model_type, num_reached)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    used = frozenset(name for name in parameters if recorder.storages.holds(parameters[name]))
    unused_modules = _top_modules_without(model, used, recorder.called)
    built = {id(p): p for name, p in parameters.items() if not is_within(name, unused_modules)}
    num_weights = sum(parameter.numel() for parameter in built.values())
    offset = 0 if has_output_layer else position_offset(model)
    inner = {module: name for name, module in model.named_modules()}
    elsewhere = [inner[indexer] for _, indexer in indexers_of(model)]
    elsewhere += [*(spec.module_name for spec in recurrent), *recorder.experts_names]
    read = _read_linears(model, used, recorder.called, elsewhere)
    return ProbedModel(
        *(layers, used, unused_modules, num_weights, recurrent, offset),
        has_own_attention=is_own and bool(layers),
        read_linears=read,
        has_attention=bool(layers),
        has_states=bool(recurrent),
        num_outputs=_num_outputs(model, recorder.num_outputs),
        indexed_length=indexed_length,
        masked_length=terms_length,
        num_logits=output.logits.shape[-1] if has_output_layer else None,
        row_shapes=recorder.row_shapes,
        argument_shapes=recorder.argument_shapes,
    )


def _run_forward(model: PreTrainedModel, cache: OwnCache | None, *, has_output_layer: bool) -> Any:
    """Return what a model makes of one packed row of tokens; UnsupportedModel: this fails."""
    tokens = torch.zeros(1, NUM_PROBE_TOKENS, dtype=torch.long, device="meta")
    kept = tokens[0]  # all rows; with a number some models skip rows of the last layers
    options: dict[str, Any] = {"logits_to_keep": kept} if has_output_layer else {}
    if cache is not None:
        options["past_key_values"] = cache
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
    """Return the counts of modules in lists, by their names."""
    return {
        f"{prefix}.{index}": counts[module]
        for prefix, modules in model.named_modules()
        if isinstance(modules, nn.ModuleList)
        for index, module in enumerate(modules)
        if module in counts
    }


def position_offset(model: PreTrainedModel) -> int:
    """Return the number that a model without output layer gives to a text's first position.

    Models that count from the padding token's number on have a method for it.
    """
    embeddings: Any = getattr(model.base_model, "embeddings", None)
    if not hasattr(embeddings, "create_position_ids_from_input_ids"):
        return 0
    return int(embeddings.padding_idx) + 1


def _read_linears(
    model: nn.Module,
    used: Collection[str],
    called: Collection[nn.Module],
    elsewhere: Collection[str],
) -> tuple[str, ...]:
    """Return the linear layers that are used and not called, outside of some modules."""
    linears = {n: m for n, m in model.named_modules() if type(m) is nn.Linear}
    multiplied = {id(module.weight) for module in linears.values() if module in called}
    return tuple(
        name
        for name, module in linears.items()
        if f"{name}.weight" in used
        and id(module.weight) not in multiplied
        and not is_within(name, elsewhere)
    )


def _num_passed_over(model: nn.Module, num_layers: int, called: Collection[nn.Module]) -> int:
    """Return how many layers of the decoder text does not reach, such as those for images."""
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
    """Raise UnsupportedModel unless `num_layers` layers attend or have a state, by own modules."""
    if len({spec.module_name for spec in recurrent}) != len(recurrent):
        raise UnsupportedModel(f"{model_type}: one recurrent module is used by several layers")
    num_mixing = len(layers) + len(recurrent)
    # A module may be that of several layers, or attend several times in one.
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
    """Raise UnsupportedModel unless all layers are causal, or none of a model that only pools."""
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
    """Return whether a tensor's name is that of a tensor in one of some modules."""
    return any(name.startswith(f"{module}.") for module in modules)
