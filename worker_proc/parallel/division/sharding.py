"""Divides the matrices of every layer among ranks (tensor parallelism).

A rank has some heads of each attention and some inner columns of each MLP. The matrices before the
heads and columns are divided by outputs, and the matrix after them by inputs; the ranks add up its
products. The output layer is divided by tokens, and the ranks gather the logits. Everything else is
the same on all ranks: embedding, norms, sampler.

The names of a module's parts determine the division that is tried. Before any module is divided,
proof.py compares the sum of the ranks' outputs with the whole module's, for one module of each
shape.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from worker_proc.adapters.sites import MatrixPart
from worker_proc.attention.interface import attending_twice
from worker_proc.attention.probed_layer import ProbedLayer
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.loader import CheckedModel, rehearse
from worker_proc.loading.model_kind import ModelKind
from worker_proc.loading.output_layer import output_layer
from worker_proc.native.kernels import NATIVE_DTYPES
from worker_proc.parallel.division.delta_net import divide_net
from worker_proc.parallel.division.griffin import divide_griffin
from worker_proc.parallel.division.kimi import divide_kimi_net
from worker_proc.parallel.division.lightning import divide_lightning
from worker_proc.parallel.division.mamba import divide_heads_of_mamba, divide_mamba
from worker_proc.parallel.division.mamba2 import divide_mamba2
from worker_proc.parallel.division.matrices import (
    fits,
    has_shape,
    low_rank_terms,
    matrix_of,
    parameter_of,
)
from worker_proc.parallel.division.mlp import divide_mlps
from worker_proc.parallel.division.module_division import Division, divide_spec
from worker_proc.parallel.division.proof import prove
from worker_proc.parallel.division.rank_norm import is_norm
from worker_proc.parallel.division.rwkv import divide_rwkv
from worker_proc.parallel.division.shared_parts import SharedParts
from worker_proc.parallel.division.short_conv import divide_short_conv
from worker_proc.parallel.share import Section, Share, refuse
from worker_proc.recurrent.state_spec import RecurrentSpec

_OUTS = ("o_proj", "out_proj", "dense", "c_proj")
"""The names of the last matrix of an attention module."""
_GATES = "g_proj"
"""The projection to a gate for each head, which multiplies the head's result."""
_LATENT = {"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"}
"""The projections to latent rows and their norms, which are the same for all heads."""
_TERMS = {
    "linear_q_adapter_list": "q_proj",
    "linear_k_adapter_list": "k_proj",
    "linear_v_adapter_list": "v_proj",
}
"""Lists of low-rank products, and the matrix to whose products each is added."""
_DIVIDED_STATES: Sequence[Callable[[str, nn.Module, Share], Division | None]] = (
    divide_net,
    divide_kimi_net,
    divide_mamba,
    divide_heads_of_mamba,
    divide_mamba2,
    divide_short_conv,
    divide_lightning,
    divide_griffin,
    divide_rwkv,
)
"""A function for each kind of module with a state, which returns the module's division."""


def check_division(checked: CheckedModel, share: Share) -> None:
    """Raise UnsupportedModel if a model cannot be divided, before its weights are read."""
    probed, device = checked.inspected.probed, checked.device.type
    if name := attending_twice(layer.module_name for layer in probed.layers):
        raise refuse(share, f"{name} attends several times in a step")
    if device != "cpu" and checked.files is not None:
        raise refuse(share, f"codes of its weights are divided on the CPU only, not on {device}")
    if checked.inspected.dtype not in NATIVE_DTYPES:
        dtype = str(checked.inspected.dtype).removeprefix("torch.")
        raise refuse(share, f"ranks exchange float32 and bfloat16, and the dtype is {dtype}")
    if checked.inspected.kind is not ModelKind.GENERATES or not checked.is_causal:
        raise refuse(share, "the model does not generate text by attention")
    _divide(rehearse(checked), probed.layers, probed.recurrent, share)


def shard(
    loaded: LoadedModel, share: Share, device: torch.device
) -> tuple[LoadedModel, dict[str, MatrixPart]]:
    """Reduce a loaded model to a rank's part, before its weights are packed.

    `check_division` must have accepted the model. Returns the model, on the device that computes
    it, and the rank's part of each divided matrix by name. Raises UnsupportedModel if the parts of
    a module do not add up to it.
    """
    divisions = _divide(loaded.model, loaded.layers, loaded.recurrent, share)
    prove(loaded, divisions, share.num_ranks)
    shared = SharedParts(loaded.model)
    for part in divisions:
        with shared.kept(loaded.model.get_submodule(part.module_name)) as module:
            part.apply(module, share)
    _divide_head(loaded, share)
    layers = [replace(layer, spec=divide_spec(layer.spec, share)) for layer in loaded.layers]
    parts = dict(pair for division in divisions for pair in division.parts(share))
    by_name = {division.module_name: division for division in divisions}
    states = [by_name[one.module_name].divide_states(one, share) for one in loaded.recurrent]
    summed = [name for division in divisions for name in division.summed_names]
    model = loaded.model.to(device)
    divided = replace(
        loaded, model=model, device=device, layers=layers, recurrent=states, summed=summed
    )
    return divided, parts


def is_divided(linear: nn.Module, vocab_size: int) -> bool:
    """Return whether a rank's output layer computes only some of the logits."""
    num_outputs: int = getattr(linear, "out_features", vocab_size)
    return num_outputs < vocab_size


def _divide_head(loaded: LoadedModel, share: Share) -> None:
    """Keep a rank's tokens in the output layer, if all ranks get the same number of tokens.

    A tied embedding keeps all tokens.
    """
    head = output_layer(loaded.model)
    if type(head) is nn.Linear and share.divides(head.out_features):
        tokens = share.of(head.out_features)
        head.weight = parameter_of(head.weight.detach()[tokens.start : tokens.stop].clone())
        if head.bias is not None:
            head.bias = parameter_of(head.bias.detach()[tokens.start : tokens.stop].clone())
        head.out_features = len(tokens)


def _divide(
    model: nn.Module,
    layers: Sequence[ProbedLayer],
    recurrent: Sequence[RecurrentSpec],
    share: Share,
) -> list[Division]:
    """Return the divisions of all modules; `model` may be on the meta device."""
    found = [_divide_attention(model, layer, share) for layer in layers]
    found += [_divide_recurrent(model, layer.module_name, share) for layer in recurrent]
    mixers = [part.module_name for part in found]
    decoder_layers = _layers_with(model, mixers)
    for name in decoder_layers:
        inner = [other for other in decoder_layers if other.startswith(f"{name}.")]
        found += divide_mlps(model, name, mixers, share, inner)
    return found


def _layers_with(model: nn.Module, mixers: Sequence[str]) -> list[str]:
    """Return the names of the decoder layers: those with mixers, and others in the same lists."""
    found: dict[str, None] = {}
    for mixer in mixers:
        layer = mixer.rpartition(".")[0]
        parent = layer.rpartition(".")[0]
        layers = model.get_submodule(parent)
        if isinstance(layers, nn.ModuleList):
            found |= {f"{parent}.{key}": None for key, _ in layers.named_children()}
        found[layer] = None
    return list(found)


def _divide_recurrent(model: nn.Module, name: str, share: Share) -> Division:
    module = model.get_submodule(name)
    for divide in _DIVIDED_STATES:
        division = divide(name, module, share)
        if division is not None:
            return division
    raise refuse(share, f"{name} has a recurrent state of a kind that is not divided")


def _divide_attention(model: nn.Module, layer: ProbedLayer, share: Share) -> Division:
    spec, name = layer.spec, layer.module_name
    attention = model.get_submodule(name)
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    if not share.divides(num_heads):
        raise refuse(share, f"{name} has {num_heads} heads")
    if not share.divides(num_kv_heads) and share.num_ranks % num_kv_heads:
        raise refuse(share, f"{name} has {num_kv_heads} KV heads")
    if layer.biases is not None or spec.kv_source is not None:
        raise refuse(share, f"{name} has biases or keys of another layer")
    queries = Section(num_heads, spec.head_dim)
    gated = Section(num_heads, 2 * spec.head_dim)
    keys = Section(num_kv_heads, spec.head_dim)
    values = Section(num_kv_heads, spec.value_head_dim)
    expansion = matrix_of(attention, "kv_b_proj")
    expanded = Section(num_heads, 0 if expansion is None else expansion.shape[-2] // num_heads)
    choices: tuple[dict[str, list[Section]], ...] = (
        {"q_proj": [queries], "k_proj": [keys], "v_proj": [values]},
        {"q_proj": [gated], "k_proj": [keys], "v_proj": [values]},
        {"qkv_proj": [queries, keys, values]},
        {"c_attn": [queries, keys, values]},
        {"q_proj": [queries], "kv_b_proj": [expanded]},
        {"q_b_proj": [queries], "kv_b_proj": [expanded]},
    )
    inputs = Section(num_heads, spec.value_head_dim)
    ends = [out for out in _OUTS if has_shape(attention, out, inputs=[inputs])]
    found = [one for one in choices if fits(attention, one)]
    if not ends or not found:
        raise refuse(share, f"{name} is not made of queries, keys, values and {_OUTS[0]}")
    columns, out = found[0], ends[0]
    heads = [Section(num_heads, 1)]
    if has_shape(attention, _GATES, outputs=heads):
        columns[_GATES] = heads
    sinks = {} if layer.sinks is None else {layer.sinks.rpartition(".")[2]: num_heads}
    common = _LATENT if "kv_b_proj" in columns else set()
    for terms, matrix in _TERMS.items():
        for term in low_rank_terms(attention, terms, matrix):
            columns[term] = columns[matrix]
            common = common | {terms}
    norms = {
        key: section
        for key, section in (("q_norm", queries), ("k_norm", keys))
        if section.num_units > 1
        and is_norm(getattr(attention, key, None), section.num_units * section.unit)
    }
    _check_others(share, name, attention, {*columns, out, *sinks, *common, *norms}, spec)
    outs = {out: inputs}
    return Division(name, columns, outs, summed=out, by_head=sinks, spec=spec, norms=norms)


def _check_others(
    share: Share, name: str, attention: nn.Module, divided: set[str], spec: LayerSpec
) -> None:
    """Raise UnsupportedModel for weights that are neither divided nor the same for every head.

    The norms of a head are the same for every head.
    """
    for key, parameter in attention.named_parameters():
        is_of_head = parameter.numel() in (spec.head_dim, spec.value_head_dim)
        if key.partition(".")[0] not in divided and not is_of_head:
            raise refuse(share, f"{name}.{key} belongs to all heads at once")
