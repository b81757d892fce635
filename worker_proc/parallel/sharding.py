"""Gives a rank its part of every layer's matrices.

A rank has some heads of each attention and some inner columns of each MLP. It multiplies by its
outputs of the matrices before these, and by its inputs of the matrix behind them, whose products
the ranks add up. Of the output layer it has some tokens, whose logits the ranks gather. Everything
else is the same on all ranks: embedding, norms, sampler.

Names decide what is tried. That the ranks' outputs add up to those of the whole module is shown for
a layer of every shape, before any is divided.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from worker_proc.adapters.sites import MatrixPart
from worker_proc.attention.recorder import ProbedLayer
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.loading.loader import CheckedModel, LoadedModel, rehearse
from worker_proc.loading.model_kind import ModelKind
from worker_proc.modules.packed_linear import output_layer
from worker_proc.native.kernels import NATIVE_DTYPES
from worker_proc.parallel import delta_division
from worker_proc.parallel.divided_matrices import fits, has_shape, matrix_of, parameter_of
from worker_proc.parallel.division import Division, divide_spec
from worker_proc.parallel.division_proof import prove
from worker_proc.parallel.rank_norm import is_norm
from worker_proc.parallel.share import Section, Share, refuse
from worker_proc.recurrent.state_spec import RecurrentSpec

_OUTS = ("o_proj", "out_proj", "dense", "c_proj")
"""The last matrix of an attention."""
_MLPS = (
    ("down_proj", "gate_proj", "up_proj"),
    ("down_proj", "gate_up_proj"),
    ("c_proj", "c_fc"),
    ("fc2", "fc1"),
)
"""The last matrix of an MLP, and those before it: gates and factors, apart or in one, or others."""
_EXPERTS = ("down_proj", "gate_up_proj")
_SHARED = ("shared_experts", "shared_expert")
"""What is computed beside the chosen experts."""
_ROUTERS = ("gate.", "router.", "shared_expert_gate.")
"""Of experts; all ranks choose alike."""
_LATENT = {"q_a_proj", "q_a_layernorm", "kv_a_proj_with_mqa", "kv_a_layernorm"}
"""What makes latent rows, which are the same for all heads."""


def check_division(checked: CheckedModel, share: Share) -> None:
    """Raise UnsupportedModel if a model cannot be divided, before its weights are read."""
    probed, device = checked.inspected.probed, checked.device.type
    if device != "cpu":
        raise refuse(share, f"it works on the CPU only, and the device is {device}")
    if checked.files is not None:
        raise refuse(share, "the checkpoint is quantized")
    if checked.inspected.dtype not in NATIVE_DTYPES:
        dtype = str(checked.inspected.dtype).removeprefix("torch.")
        raise refuse(share, f"ranks exchange float32 and bfloat16, and the dtype is {dtype}")
    if checked.inspected.kind is not ModelKind.GENERATES or not checked.is_causal:
        raise refuse(share, "the model does not generate text by attention")
    _divide(rehearse(checked), probed.layers, probed.recurrent, share)


def shard(loaded: LoadedModel, share: Share) -> tuple[LoadedModel, dict[str, MatrixPart]]:
    """Leave a rank's part of the matrices in a loaded model, whose weights are not packed yet.

    Also returns the parts, by the names of the matrices. `check_division` has allowed it.
    UnsupportedModel: the parts of a module do not add up to it.
    """
    divisions = _divide(loaded.model, loaded.layers, loaded.recurrent, share)
    prove(loaded, divisions, share.num_ranks)
    for part in divisions:
        part.apply(loaded.model.get_submodule(part.module_name), share)
    _divide_head(loaded, share)
    layers = [replace(layer, spec=divide_spec(layer.spec, share)) for layer in loaded.layers]
    parts = dict(pair for division in divisions for pair in division.parts(share))
    states = [delta_division.divide_states(one, share.num_ranks) for one in loaded.recurrent]
    return replace(loaded, layers=layers, recurrent=states), parts


def is_divided(linear: nn.Module, vocab_size: int) -> bool:
    """Return whether a rank's output layer gives some of the logits."""
    num_outputs: int = getattr(linear, "out_features", vocab_size)
    return num_outputs < vocab_size


def _divide_head(loaded: LoadedModel, share: Share) -> None:
    """Leave some tokens in the output layer, if all ranks get as many; a tied table stays whole."""
    head = output_layer(loaded.model)
    if type(head) is nn.Linear and share.divides(head.out_features):
        tokens = share.of(head.out_features)
        head.weight = parameter_of(head.weight.detach()[tokens.start : tokens.stop].clone())
        if head.bias is not None:
            head.bias = parameter_of(head.bias.detach()[tokens.start : tokens.stop].clone())
        head.out_features = len(tokens)


def layer_name(layer: ProbedLayer | RecurrentSpec) -> str:
    """Return the name of the decoder layer of an attention or recurrent module."""
    return layer.module_name.rpartition(".")[0]


def summed_modules(model: nn.Module, layer: ProbedLayer | RecurrentSpec) -> tuple[str, str]:
    """Return the modules whose outputs the ranks add up, of a layer's attention and of its MLP.

    A recurrent module is in the place of the attention.
    """
    attention, name = model.get_submodule(layer.module_name), layer_name(layer)
    out = next(one for one in _OUTS if hasattr(attention, one))
    mlp = f"{name}.mlp" if hasattr(model.get_submodule(name), "mlp") else f"{name}.fc2"
    return f"{layer.module_name}.{out}", mlp


def _divide(
    model: nn.Module,
    layers: Sequence[ProbedLayer],
    recurrent: Sequence[RecurrentSpec],
    share: Share,
) -> list[Division]:
    """Return how the layers are divided; the model may be without values."""
    found = [part for layer in layers for part in _divide_layer(model, layer, share)]
    return found + [part for layer in recurrent for part in _divide_recurrent(model, layer, share)]


def _divide_recurrent(model: nn.Module, layer: RecurrentSpec, share: Share) -> Iterator[Division]:
    name = layer.module_name
    yield delta_division.divide_net(name, model.get_submodule(name), share)
    yield _divide_mlp(model, layer_name(layer), share)


def _divide_layer(model: nn.Module, layer: ProbedLayer, share: Share) -> Iterator[Division]:
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
    choices = (
        {"q_proj": [queries], "k_proj": [keys], "v_proj": [values]},
        {"q_proj": [gated], "k_proj": [keys], "v_proj": [values]},
        {"qkv_proj": [queries, keys, values]},
        {"c_attn": [queries, keys, values]},
        {"q_proj": [queries], "kv_b_proj": [expanded]},
        {"q_b_proj": [queries], "kv_b_proj": [expanded]},
    )
    inputs = Section(num_heads, spec.value_head_dim)
    outs = [out for out in _OUTS if has_shape(attention, out, inputs=[inputs])]
    found = [one for one in choices if fits(attention, one)]
    if not outs or not found:
        raise refuse(share, f"{name} is not made of queries, keys, values and {_OUTS[0]}")
    columns, out = found[0], outs[0]
    sinks = {} if layer.sinks is None else {layer.sinks.rpartition(".")[2]: num_heads}
    common = _LATENT if "kv_b_proj" in columns else set()
    norms = {
        key: section
        for key, section in (("q_norm", queries), ("k_norm", keys))
        if section.num_units > 1
        and is_norm(getattr(attention, key, None), section.num_units * section.unit)
    }
    _check_others(share, name, attention, {*columns, out, *sinks, *common, *norms}, spec)
    yield Division(name, columns, {out: inputs}, by_head=sinks, spec=spec, norms=norms)
    yield _divide_mlp(model, layer_name(layer), share)


def _divide_mlp(model: nn.Module, layer: str, share: Share) -> Division:
    name = f"{layer}.mlp"
    mlp = getattr(model.get_submodule(layer), "mlp", None)
    if mlp is None:  # the layer itself has the matrices
        name, mlp = layer, model.get_submodule(layer)
        found = _mlp_matrices(mlp, "", [("fc2", "fc1")])
        if found is None:
            raise refuse(share, f"{layer}.mlp is missing")
        division = Division(name, *found, summed="fc2")
    else:
        found = _mlp_matrices(mlp, "", _MLPS) or _mlp_matrices(mlp, "experts.", [_EXPERTS])
        if found is None:
            raise refuse(share, f"{name} is not made of gates, factors and {_MLPS[0][0]}")
        for prefix in _SHARED:
            columns, outs = _mlp_matrices(mlp, f"{prefix}.", _MLPS) or ({}, {})
            found = found[0] | columns, found[1] | outs
        division = Division(name, *found)
        known = [*found[0], *found[1]]
        names = {f"{key}{suffix}" for key in known for suffix in ("", ".weight", ".bias", "_bias")}
        others = [key for key, _ in mlp.named_parameters() if not key.startswith(_ROUTERS)]
        if unknown := set(others) - names:
            raise refuse(share, f"{name}.{min(unknown)} is not known to be divided")
    for inner in division.outs.values():
        if not share.divides(inner.num_units):
            raise refuse(share, f"{name} has {inner.num_units} inner columns")
    return division


def _mlp_matrices(
    mlp: nn.Module, prefix: str, kinds: Sequence[tuple[str, ...]]
) -> tuple[dict[str, list[Section]], dict[str, Section]] | None:
    """Return what is divided by outputs and by inputs, of the first kind of MLP that fits."""
    for out, *columns in kinds:
        matrix = matrix_of(mlp, f"{prefix}{out}")
        if matrix is None:
            continue
        inner = Section(matrix.shape[-1], 1)
        sections = [inner]
        if columns == ["gate_up_proj"]:
            owner = mlp.get_submodule(prefix.rstrip("."))
            is_interleaved = getattr(owner, "is_concatenated", True) is False
            sections = [Section(matrix.shape[-1], 2)] if is_interleaved else [inner, inner]
        found = {f"{prefix}{column}": sections for column in columns}
        if fits(mlp, found):
            return found, {f"{prefix}{out}": inner}
    return None


def _check_others(
    share: Share, name: str, attention: nn.Module, divided: set[str], spec: LayerSpec
) -> None:
    """Refuse weights that are neither divided nor the same for every head, as norms of a head."""
    for key, parameter in attention.named_parameters():
        is_of_head = parameter.numel() in (spec.head_dim, spec.value_head_dim)
        if key.partition(".")[0] not in divided and not is_of_head:
            raise refuse(share, f"{name}.{key} belongs to all heads at once")
