"""Replaces attention modules by latent attention, if all of them are proven equivalent.

Modules do not qualify by class: a module must have the parts of multi-head latent attention, and
its replacement must reproduce its results on random rows of several scales, at the first and the
last positions. These reveal a factor on queries, a clamp or another rotation. Both are computed in
float32, so that only the order of sums differs.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, cast

import torch
from torch import nn

from worker_proc.attention.interface import transformers_attention
from worker_proc.attention.latent_attention import LatentAttention, angles_of
from worker_proc.attention.latent_products import (
    LatentProducts,
    LatentShape,
    NativeProducts,
    TorchProducts,
)
from worker_proc.attention.native import can_attend
from worker_proc.attention.probed_layer import ProbedLayer
from worker_proc.errors import UnsupportedModel, describe
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.loading.deferred_module import make_generator
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.modules.coded_weights import dequantize_weights, dequantized
from worker_proc.modules.trial_calls import Call, as_float, compute_text, first_calls
from worker_proc.modules.trial_errors import TRIAL_SCALES, greatest, greatest_row_error
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.structures import Rotation
from worker_proc.recurrent.layers import own_forwards

NUM_TOKENS = 7
MAX_ERROR = 1e-4
"""The greatest error of a row, relative to its norm; larger rows lead to scores of hundreds."""
_PARTS = {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj"}
_QUERIES = ({"q_proj"}, {"q_a_proj", "q_a_layernorm", "q_b_proj"})
_GATES = "g_proj"
_CHOICE = "prev_topk_indices"


class _Layer(NamedTuple):
    """An attention module with the parts of latent attention."""

    name: str
    module: nn.Module
    shape: LatentShape

    @property
    def expansion(self) -> nn.Linear:
        """The projection of latent rows to the keys and values of all heads."""
        return cast(nn.Linear, self.module.kv_b_proj)


def install_latent(
    loaded: LoadedModel,
    library: NativeLibrary | None,
    known: Mapping[str, int] | None = None,
) -> tuple[LoadedModel, dict[str, int]]:
    """Replace the attention modules of a model, if all of them are proven.

    Returns the model with its new attention layers, and the `Rotation` of each replaced module.
    `known` is such a result of an earlier start; with it, nothing is tried.
    """
    layers = _find_layers(loaded)
    specs = [
        _spec(layer.shape, old.spec) for layer, old in zip(layers, loaded.layers, strict=False)
    ]
    if not layers or (library is not None and not can_attend(specs, loaded.dtype, loaded.device)):
        return loaded, {}
    if known is None:
        proven = _prove(loaded, layers, library)
    else:
        proven = {
            layer.name: Rotation(known[layer.name]) for layer in layers if layer.name in known
        }
    if len(proven) < len(layers):
        return loaded, {}
    for layer in layers:
        name, module, shape = layer
        dequantize_weights([layer.expansion], "the projection of latent rows is split by heads")
        products = _products(library, shape, proven[name], layer.expansion.weight)
        parent, _, child = name.rpartition(".")
        setattr(loaded.model.get_submodule(parent), child, LatentAttention(module, shape, products))
        layer.expansion._parameters.clear()
    probed = [replace(old, spec=spec) for old, spec in zip(loaded.layers, specs, strict=True)]
    return replace(loaded, layers=probed), {name: int(number) for name, number in proven.items()}


def latent_specs(model: nn.Module, layers: Sequence[ProbedLayer]) -> list[LayerSpec]:
    """Return the layers' specs after replacement; empty: a module lacks the parts.

    `model` may be on the meta device.
    """
    found = []
    for layer in layers:
        shape = find_shape(model.get_submodule(layer.module_name), layer.spec)
        if shape is None:
            return []
        found.append(_spec(shape, layer.spec))
    return found


def _find_layers(loaded: LoadedModel) -> list[_Layer]:
    """Return all attention layers, or none unless each has the parts of latent attention."""
    found = []
    for layer in loaded.layers:
        module = loaded.model.get_submodule(layer.module_name)
        shape = find_shape(module, layer.spec)
        if shape is None or any(parameter.is_meta for parameter in module.parameters()):
            return []
        found.append(_Layer(layer.module_name, module, shape))
    return found


def find_shape(module: nn.Module, spec: LayerSpec) -> LatentShape | None:
    """Return the sizes of a module with the parts of latent attention, or None.

    `spec` describes the module's attention call.
    """
    parts = dict(module.named_children())
    parts.pop("indexer", None)  # it chooses all tokens
    gates = parts.pop(_GATES, None)
    if set(parts) - _PARTS not in _QUERIES or not set(parts) >= _PARTS:
        return None
    down, up, out = parts["kv_a_proj_with_mqa"], parts["kv_b_proj"], parts["o_proj"]
    last = parts.get("q_proj", parts.get("q_b_proj"))
    linears = (down, up, out, last, parts.get("q_a_proj", out), gates or out)
    if not all(type(part) is nn.Linear for part in linears):
        return None
    if gates is not None and gates.out_features != spec.num_heads:
        return None
    assert isinstance(down, nn.Linear)
    assert isinstance(up, nn.Linear)
    assert isinstance(last, nn.Linear)
    rope_dim = down.out_features - up.in_features
    shape = LatentShape(
        spec.num_heads, spec.head_dim - rope_dim, rope_dim, spec.value_head_dim, up.in_features
    )
    fits = (
        spec.num_heads == spec.num_kv_heads
        and rope_dim >= 0
        and rope_dim % 2 == 0
        and shape.nope_dim > 0
        and shape.head_dim % 2 == 0
        and shape.row_dim % 2 == 0
        and up.bias is None
        and up.out_features == spec.num_heads * (shape.nope_dim + shape.value_dim)
        and last.out_features == spec.num_heads * spec.head_dim
        and isinstance(getattr(module, "scaling", None), float)
        and hasattr(module, "config")
    )
    return shape if fits else None


def _spec(shape: LatentShape, old: LayerSpec) -> LayerSpec:
    return LayerSpec(shape.num_heads, 1, shape.row_dim, shape.rank, old.window, is_latent=True)


def _products(
    library: NativeLibrary | None, shape: LatentShape, rotation: Rotation, weight: torch.Tensor
) -> LatentProducts:
    if library is None:
        return TorchProducts(shape, rotation, weight)
    return NativeProducts(library, shape, rotation, weight)


@torch.inference_mode()
def _prove(
    loaded: LoadedModel, layers: list[_Layer], library: NativeLibrary | None
) -> dict[str, Rotation]:
    """Return the rotations of modules whose replacements agree, up to the first that does not."""
    proven: dict[str, Rotation] = {}
    with transformers_attention(loaded.model), own_forwards(loaded.model):
        calls = _record_calls(loaded, layers[0].module)
        for layer in layers if calls else ():
            try:
                rotation = _rotation_of(layer, calls, library)
            except RuntimeError as error:
                name = f"{loaded.model.config.model_type}: {layer.name}"
                raise UnsupportedModel(
                    f"{name} fails in transformers ({describe(error)})"
                ) from error
            if rotation is None:
                break
            proven[layer.name] = rotation
    return proven


def _record_calls(loaded: LoadedModel, module: nn.Module) -> list[Call]:
    """Return a module's arguments except its rows, at the first and at the last positions."""
    calls: list[Call] = []
    for first in (0, max(loaded.model_len - NUM_TOKENS, 0)):
        found = first_calls([module], partial(compute_text, loaded, first, NUM_TOKENS))
        for args, kwargs in found.values():
            if not args:
                calls.append(as_float(kwargs))
                calls[-1].pop("hidden_states", None)
    return calls


def _rotation_of(
    layer: _Layer, calls: list[Call], library: NativeLibrary | None
) -> Rotation | None:
    """Return the rotation whose replacement is closest to the module; None: none agrees."""
    with dequantized(layer.module):
        module = copy.deepcopy(layer.module).float()
    weight = layer.expansion.weight.float()
    best, min_error = None, MAX_ERROR
    have_angles = any(angles_of(call.get("position_embeddings")) is not None for call in calls)
    for rotation in Rotation if have_angles else (Rotation.NONE,):
        products = _products(library, layer.shape, rotation, weight)
        candidate = LatentAttention(module, layer.shape, products)
        error = max(_error(module, candidate, call) for call in calls)
        if error < min_error:
            best, min_error = rotation, error
    return best


def _error(module: nn.Module, candidate: nn.Module, call: Call) -> float:
    """Return the greatest error of a row at any scale, relative to its norm."""
    if _CHOICE in call:  # another layer's indexer chooses all tokens
        call = call | {
            _CHOICE: torch.arange(NUM_TOKENS, dtype=torch.int32).expand(1, NUM_TOKENS, -1)
        }
    generator = make_generator(1)
    size = cast(nn.Linear, module.kv_a_proj_with_mqa).in_features
    errors = []
    for scale in TRIAL_SCALES:
        rows = torch.randn(1, NUM_TOKENS, size, generator=generator) * scale
        expected, found = module(rows, **call), candidate(rows, **call)
        if len(expected) != len(found) or expected[0].shape != found[0].shape:
            return math.inf
        errors.append(greatest_row_error(found[0], expected[0]))
    return greatest(errors)
