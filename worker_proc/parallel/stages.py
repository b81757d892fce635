"""Divides the layers of a model into the stages of a pipeline (pipeline parallelism).

A stage is a model that has some of the layers; the others are not built. A passage module replaces
the layer before the stage's first one, and returns the rows of the previous stage. Another replaces
the layer after the stage's last one, and keeps the rows for the next stage. The first stage has the
embedding, and the last stage the output layer. A stage has the states of its own recurrent layers.
It may have no recurrent layer, or no attention, although the model has both. If layers also take
the rows of the embedding, these follow the other values, in rows of twice the width. Weights that
layers of several stages share are read in each of these stages.

At load, a table of random rows replaces a missing embedding, so that all checks of a model also run
on a stage. A model is refused if its layers take more than these rows, for example inputs that are
made from tokens for each layer.
"""

import inspect
from collections.abc import Collection
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from worker_proc.adapters.sites import OtherStages
from worker_proc.attention.interface import attending_twice
from worker_proc.attention.probe import ProbedModel, is_within
from worker_proc.errors import UnsupportedModel
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.loader import CheckedModel, rehearse
from worker_proc.loading.model_kind import ModelKind
from worker_proc.loading.output_layer import output_layer
from worker_proc.loading.passages import AnyRows, LayerForm, Passage, StageModel
from worker_proc.loading.rescaled_layers import divisor_behind
from worker_proc.native.kernels import NATIVE_DTYPES
from worker_proc.parallel.stage import Stage

_EMBEDDING = "original_hidden_states"
"""The argument with which layers take the rows of the embedding, too."""


class _NoOutput(nn.Module):
    """Replaces the output layer, and returns its input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.empty(0, dtype=dtype)
        """An empty tensor, from which models read the dtype."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states


class SharedLayer(NamedTuple):
    """A layer with weights that later layers share."""

    layers: frozenset[int]
    """The later layers."""
    rest: list[str]
    """The modules of the layer that have none of the shared weights."""


class StageParts(NamedTuple):
    """The names of the modules that are divided among stages, and their properties."""

    layers: list[str]
    embedding: str
    head: str
    is_tied: bool
    """True if the output layer has the embedding's weight."""
    head_layers: int
    """The number of layers with half as many weights as the output layer, which computes only the
    last row of a prompt."""
    widths: list[int]
    """For each layer, the number of inputs and outputs of all linear layers in it."""
    forms: list[LayerForm]
    """The form of the passage that replaces each layer."""
    shared: dict[int, SharedLayer]
    """Layers with weights that later layers share."""
    takes_embedding: bool
    """True if layers take the rows of the embedding, too."""

    def own(self, stage: Stage) -> range:
        """Return the layers of a stage."""
        return stage.layers(len(self.layers), self.head_layers)

    def division(self, num_stages: int) -> str:
        """Describe the layers of each stage in one line."""
        parts = [self.own(Stage(place, num_stages)) for place in range(num_stages)]
        return "layers " + ", ".join(f"{part.start}-{part.stop - 1}" for part in parts)

    def others(self, stage: Stage) -> OtherStages:
        """Return the decoder layers that a stage does not have."""
        own = self.own(stage)
        others = [index for index in range(len(self.layers)) if index not in own]
        names = [self.layers[index] for index in others]
        return OtherStages(names, sum(self.widths[index] for index in others))

    def absent(self, stage: Stage) -> list[str]:
        """Return the modules that a stage does not compute."""
        return [*self.others(stage).layers, *self._absent_ends(stage)]

    def unread(self, stage: Stage) -> list[str]:
        """Return the modules of which a stage reads no weights; it reads those that it shares."""
        own, names = self.own(stage), self._absent_ends(stage)
        for index, name in enumerate(self.layers):
            shared = self.shared.get(index)
            if index not in own:
                is_shared = shared is not None and not shared.layers.isdisjoint(own)
                names += shared.rest if shared is not None and is_shared else [name]
        return names

    def _absent_ends(self, stage: Stage) -> list[str]:
        names = []
        if not stage.is_last:
            names.append(self.head)
        if not stage.is_first and not (stage.is_last and self.is_tied):
            names.append(self.embedding)
        return names


def check_stages(checked: CheckedModel, num_stages: int) -> StageParts:
    """Return the parts of a model; raises UnsupportedModel if its layers cannot be divided.

    No weights are read.
    """
    probed, device = checked.inspected.probed, checked.device.type
    if device != "cpu":
        raise refuse_stages(num_stages, f"it works on the CPU only, and the device is {device}")
    if checked.inspected.dtype not in NATIVE_DTYPES:
        dtype = str(checked.inspected.dtype).removeprefix("torch.")
        raise refuse_stages(
            num_stages, f"stages compute in float32 and bfloat16, and not in {dtype}"
        )
    if checked.inspected.kind is not ModelKind.GENERATES or not checked.is_causal:
        raise refuse_stages(num_stages, "the model does not generate text by attention")
    if probed.has_own_attention:
        raise refuse_stages(num_stages, "attention is in the model's own code")
    if name := attending_twice(layer.module_name for layer in probed.layers):
        raise refuse_stages(num_stages, f"{name} attends several times in a step")
    for layer in probed.layers:
        if layer.spec.kv_source is not None or layer.biases is not None:
            raise refuse_stages(
                num_stages, f"{layer.module_name} has keys of another layer, or biases"
            )
    model = rehearse(checked)
    layers = _layer_names(model, probed, num_stages)
    forms = [_form_of(model, name, probed) for name in layers]
    return _parts_of(model, layers, forms, num_stages)


def only_stage(checked: CheckedModel, parts: StageParts, stage: Stage) -> CheckedModel:
    """Return the part of a checked model that a stage builds and reads."""
    absent, unread = parts.absent(stage), parts.unread(stage)
    probed = checked.inspected.probed
    own = replace(
        probed,
        layers=[one for one in probed.layers if not is_within(one.module_name, absent)],
        recurrent=[one for one in probed.recurrent if not is_within(one.module_name, absent)],
        parameters=frozenset(name for name in probed.parameters if not is_within(name, unread)),
        unused_modules=(*probed.unused_modules, *unread),
        read_linears=tuple(name for name in probed.read_linears if not is_within(name, absent)),
    )
    return checked._replace(inspected=checked.inspected._replace(probed=own))


def connect_stage(loaded: LoadedModel, parts: StageParts, stage: Stage) -> StageModel:
    """Replace the modules that a stage does not have by passages, and return these."""
    model, own = loaded.model, parts.own(stage)
    others = (index for index in range(len(parts.layers)) if index not in own)
    passages = {index: Passage(parts.forms[index]) for index in others}
    for index, passage in passages.items():
        model.set_submodule(parts.layers[index], passage)
    width, embedding = hidden_size(model), None
    if not stage.is_first:
        embedding = AnyRows(width, loaded.dtype)
        model.set_submodule(parts.embedding, embedding)
    inlet, outlet = passages.get(own.start - 1), passages.get(own.stop)
    if inlet is not None:
        inlet.factor = divisor_behind(model, own.start - 1)
    if outlet is not None:
        model.set_submodule(parts.head, _NoOutput(loaded.dtype))
        outlet.keeps = True
        outlet.keeps_embedding = parts.takes_embedding
    return StageModel(
        inlet,
        outlet,
        parts.division(stage.num_stages),
        first_layer=parts.layers[own.start],
        last_layer=parts.layers[own.stop - 1],
        row_width=2 * width if parts.takes_embedding else width,
        embedding=embedding if parts.takes_embedding else None,
    )


def hidden_size(model: nn.Module) -> int:
    """Return the width of the rows between two layers."""
    config: Any = model.config
    width: int = config.get_text_config(decoder=True).hidden_size
    return width


def refuse_stages(num_stages: int, reason: str) -> UnsupportedModel:
    """Return the error for a model whose layers cannot be divided into stages."""
    return UnsupportedModel(f"pipeline_parallel_size {num_stages}: {reason}")


def _layer_names(model: nn.Module, probed: ProbedModel, num_stages: int) -> list[str]:
    """Return the names of all layers: the modules of one list, all of which compute text.

    Every module that mixes tokens must be a part of one of them.
    """
    kinds = [
        [_layer_with(model, one.module_name) for one in kind]
        for kind in (probed.layers, probed.recurrent)
    ]
    mixing = [*kinds[0], *kinds[1]]
    prefix = mixing[0].rpartition(".")[0]
    parent: Any = model.get_submodule(prefix)
    length = len(parent) if isinstance(parent, nn.ModuleList) else 0
    names = [f"{prefix}.{index}" for index in range(length)]
    places = {name: index for index, name in enumerate(names)}
    for name in mixing:
        if name not in places:
            raise refuse_stages(num_stages, f"{name} is not in a list of layers with the others")
    if any(places[one] > places[other] for kind in kinds for one, other in pairwise(kind)):
        raise refuse_stages(num_stages, f"the layers of {prefix} are not computed in their order")
    if skipped := [name for name in names if name in probed.unused_modules]:
        raise refuse_stages(num_stages, f"text does not pass through {skipped[0]}")
    if length < num_stages:
        raise refuse_stages(num_stages, f"the model has {length} layers")
    return names


def _layer_with(model: nn.Module, name: str) -> str:
    """Return the innermost module around `name` that is an element of a list, or the parent."""
    layer = parent = name.rpartition(".")[0]
    while layer:
        above = layer.rpartition(".")[0]
        if isinstance(model.get_submodule(above), nn.ModuleList):
            return layer
        layer = above
    return parent


def _shared_parts(model: Any, layers: list[str]) -> dict[int, SharedLayer]:
    """Return the layers with weights that others share, from the names of these weights."""
    found: dict[int, tuple[set[str], set[int]]] = {}
    for name, source in model.all_tied_weights_keys.items():
        owner, user = (
            next((index for index, layer in enumerate(layers) if is_within(one, [layer])), None)
            for one in (source, name)
        )
        if owner is not None and user is not None:
            sources, users = found.setdefault(owner, (set(), set()))
            sources.add(source)
            users.add(user)
    return {
        index: SharedLayer(frozenset(users), _without(model, layers[index], sources))
        for index, (sources, users) in found.items()
    }


def _without(model: nn.Module, name: str, parameters: Collection[str]) -> list[str]:
    """Return the largest modules within the module `name` that have none of `parameters`."""
    names = []
    for child, _ in model.get_submodule(name).named_children():
        path = f"{name}.{child}"
        within = [one for one in parameters if is_within(one, [path])]
        names += _without(model, path, within) if within else [path]
    return names


def _take_embedding(model: nn.Module, layers: list[str]) -> bool:
    """Return whether all layers have an argument for the rows of the embedding."""
    forwards = [type(model.get_submodule(layer)).forward for layer in layers]
    return all(_EMBEDDING in inspect.signature(forward).parameters for forward in forwards)


def _form_of(model: nn.Module, name: str, probed: ProbedModel) -> LayerForm:
    """Return the form of the passage that may replace a layer."""
    found = vars(model.get_submodule(name)).items()
    labels = {key: value for key, value in found if isinstance(value, str)}
    return LayerForm(probed.num_outputs.get(name, 0), labels)


def _parts_of(model: Any, layers: list[str], forms: list[LayerForm], num_stages: int) -> StageParts:
    embedding, head = model.get_input_embeddings(), output_layer(model)
    names = {module: name for name, module in model.named_modules()}
    if head is None or embedding not in names or head not in names:
        raise refuse_stages(num_stages, "the model shows no embedding and output layer")
    is_tied = any(is_within(name, [names[head]]) for name in model.all_tied_weights_keys)
    per_layer = sum(map(_num_weights, map(model.get_submodule, layers))) / len(layers)
    head_layers = int(_num_weights(head) / (2 * per_layer))
    widths = [_widths(model.get_submodule(layer)) for layer in layers]
    return StageParts(
        layers,
        names[embedding],
        names[head],
        is_tied,
        head_layers,
        widths,
        forms,
        _shared_parts(model, layers),
        _take_embedding(model, layers),
    )


def _widths(layer: nn.Module) -> int:
    """Return the number of inputs and outputs of all linear layers in a layer."""
    linears = (each for each in layer.modules() if isinstance(each, nn.Linear | Conv1D))
    return sum(sum(linear.weight.shape) for linear in linears)


def _num_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
