"""Gives a rank its part of every layer's matrices.

A rank has some heads of each attention and some inner columns of each MLP. It multiplies by its
outputs of the matrices before these, and by its inputs of the matrix behind them, whose products
the ranks add up. Of the output layer it has some tokens, whose logits the ranks gather. Everything
else is the same on all ranks: embedding, norms, sampler.

Names decide what is tried. That the ranks' outputs add up to those of the whole module is shown for
a layer of every shape, before any is divided.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from worker_proc.adapters.sites import MatrixPart, Span
from worker_proc.attention.interface import transformers_attention
from worker_proc.attention.recorder import ProbedLayer
from worker_proc.calibration.self_check import check_texts, max_error
from worker_proc.errors import UnsupportedModel
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.loading.loader import CheckedModel, LoadedModel, rehearse
from worker_proc.loading.model_kind import ModelKind
from worker_proc.modules.experts import is_transposed
from worker_proc.modules.packed_linear import output_layer
from worker_proc.native.kernels import NATIVE_DTYPES
from worker_proc.parallel import delta_division
from worker_proc.parallel.rank_norm import RankNorm, divide_norm, is_norm
from worker_proc.recurrent.layers import own_forwards
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


class Share(NamedTuple):
    """A rank's part of what is divided."""

    rank: int
    num_ranks: int

    def of(self, num_units: int) -> range:
        """Return the units of a rank; several ranks have the same one if there are fewer units."""
        if num_units < self.num_ranks:
            unit = self.rank * num_units // self.num_ranks
            return range(unit, unit + 1)
        count = num_units // self.num_ranks
        return range(self.rank * count, (self.rank + 1) * count)

    def divides(self, num_units: int) -> bool:
        """Return whether all ranks get as many units."""
        return num_units % self.num_ranks == 0


class Section(NamedTuple):
    """Consecutive outputs or inputs of a matrix, in units that stay together."""

    num_units: int
    unit: int


@dataclass(frozen=True, slots=True)
class Division:
    """How a module is divided: by outputs of some matrices, and by inputs of others.

    A matrix is a linear layer, or the parameter with those of all experts.
    """

    module_name: str
    columns: dict[str, list[Section]]
    """The matrices that are divided by outputs, by their names in the module."""
    outs: dict[str, Section]
    """Those that are divided by inputs."""
    summed: str = ""
    """The part of the module whose outputs the ranks add up; "": those of the module itself."""
    by_head: dict[str, int] = field(default_factory=dict)
    """Parameters with a value for each head, and the number of heads."""
    spec: LayerSpec | None = None
    """Of an attention module."""
    norms: dict[str, Section] = field(default_factory=dict)
    """Norms of all queries or keys together."""
    channels: dict[str, list[Section]] = field(default_factory=dict)
    """Convolutions of each channel by itself."""

    def apply(self, module: nn.Module, share: Share) -> None:
        """Leave a rank's part in the module."""
        for name, sections in self.columns.items():
            _keep_outputs(module, name, sections, share)
        for name, section in self.outs.items():
            _keep_inputs(module, name, section, share)
        for name, sections in self.channels.items():
            _keep_channels(module.get_submodule(name), sections, share)
        for name, num_heads in self.by_head.items():
            kept = share.of(num_heads)
            values = getattr(module, name)[kept.start : kept.stop]
            setattr(module, name, _parameter(values.clone()))
        for name, section in self.norms.items():
            own = share.of(section.num_units)
            places = slice(own.start * section.unit, own.stop * section.unit)
            setattr(module, name, divide_norm(getattr(module, name), places, share.num_ranks))
        if self.spec is not None:
            _set_counts(module, divide_spec(self.spec, share))
        if self.channels:
            delta_division.set_counts(module, share.num_ranks)

    def parts(self, share: Share) -> Iterator[tuple[str, MatrixPart]]:
        """Yield the names of the divided matrices, and what a rank has of them."""
        for name, sections in self.columns.items():
            first, spans = 0, []
            for section in sections:
                spans.append(_span(section, share, first))
                first += section.num_units * section.unit
            yield f"{self.module_name}.{name}", MatrixPart(spans)
        for name, section in self.outs.items():
            yield f"{self.module_name}.{name}", MatrixPart(inputs=_span(section, share))


def check_division(checked: CheckedModel, share: Share) -> None:
    """Raise UnsupportedModel if a model cannot be divided, before its weights are read."""
    probed, device = checked.inspected.probed, checked.device.type
    if device != "cpu":
        raise _refuse(share, f"it works on the CPU only, and the device is {device}")
    if checked.files is not None:
        raise _refuse(share, "the checkpoint is quantized")
    if checked.inspected.dtype not in NATIVE_DTYPES:
        dtype = str(checked.inspected.dtype).removeprefix("torch.")
        raise _refuse(share, f"ranks exchange float32 and bfloat16, and the dtype is {dtype}")
    if checked.inspected.kind is not ModelKind.GENERATES or not checked.is_causal:
        raise _refuse(share, "the model does not generate text by attention")
    _divide(rehearse(checked), probed.layers, probed.recurrent, share)


def shard(loaded: LoadedModel, share: Share) -> tuple[LoadedModel, dict[str, MatrixPart]]:
    """Leave a rank's part of the matrices in a loaded model, whose weights are not packed yet.

    Also returns the parts, by the names of the matrices. `check_division` has allowed it.
    UnsupportedModel: the parts of a module do not add up to it.
    """
    divisions = _divide(loaded.model, loaded.layers, loaded.recurrent, share)
    _prove(loaded, divisions, share.num_ranks)
    for part in divisions:
        part.apply(loaded.model.get_submodule(part.module_name), share)
    _divide_head(loaded, share)
    layers = [replace(layer, spec=divide_spec(layer.spec, share)) for layer in loaded.layers]
    parts = dict(pair for division in divisions for pair in division.parts(share))
    states = [delta_division.divide_states(one, share.num_ranks) for one in loaded.recurrent]
    return replace(loaded, layers=layers, recurrent=states), parts


def _span(section: Section, share: Share, first: int = 0) -> Span:
    own, unit = share.of(section.num_units), section.unit
    return Span(first + own.start * unit, section.num_units * unit, len(own) * unit)


def is_divided(linear: nn.Module, vocab_size: int) -> bool:
    """Return whether a rank's output layer gives some of the logits."""
    num_outputs: int = getattr(linear, "out_features", vocab_size)
    return num_outputs < vocab_size


def _divide_head(loaded: LoadedModel, share: Share) -> None:
    """Leave some tokens in the output layer, if all ranks get as many; a tied table stays whole."""
    head = output_layer(loaded.model)
    if type(head) is nn.Linear and share.divides(head.out_features):
        tokens = share.of(head.out_features)
        head.weight = _parameter(head.weight.detach()[tokens.start : tokens.stop].clone())
        if head.bias is not None:
            head.bias = _parameter(head.bias.detach()[tokens.start : tokens.stop].clone())
        head.out_features = len(tokens)


def divide_spec(spec: LayerSpec, share: Share) -> LayerSpec:
    """Return the attention of a rank's heads."""
    return replace(
        spec,
        num_heads=len(share.of(spec.num_heads)),
        num_kv_heads=len(share.of(spec.num_kv_heads)),
    )


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


def _refuse(share: Share, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"tensor_parallel_size {share.num_ranks}: {reason}")


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
    module = model.get_submodule(name)
    try:
        heads = delta_division.heads_of(module)
    except UnsupportedModel as error:
        raise _refuse(share, f"{name} {error}") from error
    if not share.divides(heads.num_keys) or heads.num_values % heads.num_keys:
        problem = f"{heads.num_keys} heads of keys and {heads.num_values} of values"
        raise _refuse(share, f"{name} has {problem}")
    keys = Section(heads.num_keys, heads.key_size)
    values = Section(heads.num_values, heads.value_size)
    gates = Section(heads.num_values, 1)
    of_keys = heads.num_values // heads.num_keys
    together = 2 * (heads.key_size + of_keys * heads.value_size)
    choices: tuple[dict[str, list[Section]], ...] = (
        {
            "in_proj_qkv": [keys, keys, values],
            "in_proj_z": [values],
            "in_proj_b": [gates],
            "in_proj_a": [gates],
        },
        {
            "in_proj_qkvz": [Section(heads.num_keys, together)],
            "in_proj_ba": [Section(heads.num_keys, 2 * of_keys)],
        },
    )
    found = [one for one in choices if _fits(module, one)]
    outs = {delta_division.OUT: values}
    if not found or not _has_shape(module, delta_division.OUT, inputs=[values]):
        raise _refuse(share, f"{name} has projections of other sizes than its heads")
    yield Division(
        name,
        found[0],
        outs,
        by_head=dict.fromkeys(delta_division.BY_HEAD, heads.num_values),
        channels={delta_division.CONVOLUTION: [keys, keys, values]},
    )
    yield _divide_mlp(model, layer_name(layer), share)


def _divide_layer(model: nn.Module, layer: ProbedLayer, share: Share) -> Iterator[Division]:
    spec, name = layer.spec, layer.module_name
    attention = model.get_submodule(name)
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    if not share.divides(num_heads):
        raise _refuse(share, f"{name} has {num_heads} heads")
    if not share.divides(num_kv_heads) and share.num_ranks % num_kv_heads:
        raise _refuse(share, f"{name} has {num_kv_heads} KV heads")
    if layer.biases is not None or spec.kv_source is not None:
        raise _refuse(share, f"{name} has biases or keys of another layer")
    queries = Section(num_heads, spec.head_dim)
    gated = Section(num_heads, 2 * spec.head_dim)
    keys = Section(num_kv_heads, spec.head_dim)
    values = Section(num_kv_heads, spec.value_head_dim)
    expansion = _matrix(attention, "kv_b_proj")
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
    outs = [out for out in _OUTS if _has_shape(attention, out, inputs=[inputs])]
    found = [one for one in choices if _fits(attention, one)]
    if not outs or not found:
        raise _refuse(share, f"{name} is not made of queries, keys, values and {_OUTS[0]}")
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
            raise _refuse(share, f"{layer}.mlp is missing")
        division = Division(name, *found, summed="fc2")
    else:
        found = _mlp_matrices(mlp, "", _MLPS) or _mlp_matrices(mlp, "experts.", [_EXPERTS])
        if found is None:
            raise _refuse(share, f"{name} is not made of gates, factors and {_MLPS[0][0]}")
        for prefix in _SHARED:
            columns, outs = _mlp_matrices(mlp, f"{prefix}.", _MLPS) or ({}, {})
            found = found[0] | columns, found[1] | outs
        division = Division(name, *found)
        known = [*found[0], *found[1]]
        names = {f"{key}{suffix}" for key in known for suffix in ("", ".weight", ".bias", "_bias")}
        others = [key for key, _ in mlp.named_parameters() if not key.startswith(_ROUTERS)]
        if unknown := set(others) - names:
            raise _refuse(share, f"{name}.{min(unknown)} is not known to be divided")
    for inner in division.outs.values():
        if not share.divides(inner.num_units):
            raise _refuse(share, f"{name} has {inner.num_units} inner columns")
    return division


def _mlp_matrices(
    mlp: nn.Module, prefix: str, kinds: Sequence[tuple[str, ...]]
) -> tuple[dict[str, list[Section]], dict[str, Section]] | None:
    """Return what is divided by outputs and by inputs, of the first kind of MLP that fits."""
    for out, *columns in kinds:
        matrix = _matrix(mlp, f"{prefix}{out}")
        if matrix is None:
            continue
        inner = Section(matrix.shape[-1], 1)
        sections = [inner]
        if columns == ["gate_up_proj"]:
            owner = mlp.get_submodule(prefix.rstrip("."))
            is_interleaved = getattr(owner, "is_concatenated", True) is False
            sections = [Section(matrix.shape[-1], 2)] if is_interleaved else [inner, inner]
        found = {f"{prefix}{column}": sections for column in columns}
        if _fits(mlp, found):
            return found, {f"{prefix}{out}": inner}
    return None


def _fits(module: nn.Module, columns: dict[str, list[Section]]) -> bool:
    return all(_has_shape(module, name, outputs=parts) for name, parts in columns.items())


def _has_shape(
    module: nn.Module,
    name: str,
    *,
    outputs: Sequence[Section] | None = None,
    inputs: Sequence[Section] | None = None,
) -> bool:
    """Return whether a matrix is there and has this number of outputs or of inputs."""
    matrix = _matrix(module, name)
    if matrix is None:
        return False
    for parts, size in ((outputs, matrix.shape[-2]), (inputs, matrix.shape[-1])):
        if parts is not None and sum(part.num_units * part.unit for part in parts) != size:
            return False
    return True


def _matrix(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return a matrix, or those of all experts, `[..., outputs, inputs]`; None: it is not there."""
    parent, _, last = name.rpartition(".")
    owner: Any = getattr(module, parent, None) if parent else module
    found: Any = getattr(owner, last, None)
    if isinstance(found, nn.Parameter):
        return _as_stored(owner, found.detach())
    if type(found) not in (nn.Linear, Conv1D):
        return None
    weight: torch.Tensor = found.weight.detach()
    return weight.mT if type(found) is Conv1D else weight


def _as_stored(owner: Any, matrix: torch.Tensor) -> torch.Tensor:
    """Return `[..., outputs, inputs]` as the experts of a module store it, and the reverse."""
    return matrix.mT if is_transposed(owner) else matrix


def _check_others(
    share: Share, name: str, attention: nn.Module, divided: set[str], spec: LayerSpec
) -> None:
    """Refuse weights that are neither divided nor the same for every head, as norms of a head."""
    for key, parameter in attention.named_parameters():
        is_of_head = parameter.numel() in (spec.head_dim, spec.value_head_dim)
        if key.partition(".")[0] not in divided and not is_of_head:
            raise _refuse(share, f"{name}.{key} belongs to all heads at once")


def _kept_units(sections: Sequence[Section], share: Share) -> list[int]:
    """Return the places of a rank's units."""
    kept: list[int] = []
    first = 0
    for part in sections:
        units = share.of(part.num_units)
        kept += range(first + units.start * part.unit, first + units.stop * part.unit)
        first += part.num_units * part.unit
    return kept


def _keep_outputs(module: nn.Module, name: str, sections: Sequence[Section], share: Share) -> None:
    kept = _kept_units(sections, share)
    outputs = torch.tensor(kept)
    matrix = _matrix(module, name)
    assert matrix is not None
    _replace(module, name, matrix.index_select(-2, outputs))
    linear, bias = _bias_of(module, name)
    if isinstance(linear, nn.Linear):
        linear.out_features = len(kept)
    elif isinstance(linear, Conv1D):
        linear.nf = len(kept)
    if bias is not None:
        _set_bias(module, name, bias.index_select(-1, outputs))


def _keep_channels(convolution: Any, sections: Sequence[Section], share: Share) -> None:
    kept = torch.tensor(_kept_units(sections, share))
    convolution.weight = _parameter(convolution.weight.detach().index_select(0, kept))
    if convolution.bias is not None:
        convolution.bias = _parameter(convolution.bias.detach().index_select(0, kept))
    convolution.in_channels = convolution.out_channels = convolution.groups = len(kept)


def _keep_inputs(module: nn.Module, name: str, section: Section, share: Share) -> None:
    """Keep some inputs; rank 0 adds the bias, which the sum of all ranks contains once."""
    units = share.of(section.num_units)
    matrix = _matrix(module, name)
    assert matrix is not None
    _replace(module, name, matrix[..., units.start * section.unit : units.stop * section.unit])
    linear, bias = _bias_of(module, name)
    if isinstance(linear, nn.Linear):
        linear.in_features = len(units) * section.unit
    elif isinstance(linear, Conv1D):
        linear.nx = len(units) * section.unit
    if bias is None or share.rank == 0:
        return
    if isinstance(linear, nn.Linear):
        linear.register_parameter("bias", None)
    else:
        _set_bias(module, name, torch.zeros_like(bias))


def _replace(module: nn.Module, name: str, matrix: torch.Tensor) -> None:
    """Replace a matrix, `[..., outputs, inputs]`."""
    parent, _, last = name.rpartition(".")
    owner = module.get_submodule(parent)
    found = getattr(owner, last)
    if isinstance(found, nn.Linear | Conv1D):
        stored = matrix.mT if isinstance(found, Conv1D) else matrix
        found.weight = _parameter(stored)
    else:
        setattr(owner, last, _parameter(_as_stored(owner, matrix)))


def _bias_of(module: nn.Module, name: str) -> tuple[nn.Module | None, torch.Tensor | None]:
    """Return the linear layer with a matrix, if one has it, and the bias: of experts, theirs."""
    parent, _, last = name.rpartition(".")
    owner = module.get_submodule(parent)
    found = getattr(owner, last)
    if isinstance(found, nn.Linear | Conv1D):
        return found, None if found.bias is None else found.bias.detach()
    bias = getattr(owner, f"{last}_bias", None)
    return None, None if bias is None else bias.detach()


def _set_bias(module: nn.Module, name: str, values: torch.Tensor) -> None:
    parent, _, last = name.rpartition(".")
    owner = module.get_submodule(parent)
    found = getattr(owner, last)
    if isinstance(found, nn.Linear | Conv1D):
        found.bias = _parameter(values)
    else:
        setattr(owner, f"{last}_bias", _parameter(values))


def _parameter(values: torch.Tensor) -> nn.Parameter:
    has_more = values.untyped_storage().nbytes() > values.numel() * values.element_size()
    if has_more or not values.is_contiguous():
        values = values.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(values, requires_grad=False)


def _set_counts(attention: nn.Module, spec: LayerSpec) -> None:
    """Change the counts that attention modules keep, or read from their configuration."""
    counts = {
        "num_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "num_key_value_groups": spec.num_heads // spec.num_kv_heads,
        "split_size": spec.num_heads * spec.head_dim,
    }
    for name, value in counts.items():
        if hasattr(attention, name):
            setattr(attention, name, value)
    config: Any = copy.copy(attention.config)
    config.num_attention_heads = spec.num_heads
    config.num_key_value_heads = spec.num_kv_heads
    attention.config = config


class _Call(NamedTuple):
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: torch.Tensor


@torch.inference_mode()
def _prove(loaded: LoadedModel, divisions: Sequence[Division], num_ranks: int) -> None:
    """Show for a module of every shape that the ranks' outputs add up to its own."""
    shapes = {_shape(part): part for part in reversed(divisions)}
    model = loaded.model
    with transformers_attention(model), own_forwards(model):
        with _recorded(model, [part.module_name for part in shapes.values()]) as calls:
            text = check_texts(loaded.vocab_size)[0]
            model(input_ids=torch.tensor([text]), use_cache=False)
        for part in shapes.values():
            call = calls[part.module_name]
            expected = _output(model.get_submodule(part.module_name), call, part.summed).float()
            found = torch.zeros(expected.shape, dtype=torch.float32)
            modules = []
            for rank in range(num_ranks):
                modules.append(copy.deepcopy(model.get_submodule(part.module_name)))
                part.apply(modules[-1], Share(rank, num_ranks))
            for name in part.norms:
                _add_up_squares([getattr(module, name) for module in modules], modules, call)
            for module in modules:
                try:
                    found += _output(module, call, part.summed).float()
                except RuntimeError as error:
                    reason = f"a part of {part.module_name} cannot be computed ({error})"
                    raise _refuse(Share(0, num_ranks), reason) from error
            difference = float((found - expected).norm() / expected.norm().clamp_min(1e-6))
            if not difference <= max_error(loaded.dtype):
                raise UnsupportedModel(
                    f"tensor_parallel_size {num_ranks}: the parts of {part.module_name} do not add"
                    f" up to it (relative error {difference:.3g})"
                )


def _add_up_squares(norms: Sequence[RankNorm], modules: Sequence[nn.Module], call: _Call) -> None:
    """Let the norms of all ranks' modules have the sums that they would exchange in a call."""
    sums: list[torch.Tensor] = []
    for norm, module in zip(norms, modules, strict=True):
        norm.add_up = lambda rows: sums.append(rows.clone())
        module(*call.args, **call.kwargs)
    total = torch.stack(sums).sum(0)

    def give_total(rows: torch.Tensor) -> None:
        rows.copy_(total)

    for norm in norms:
        norm.add_up = give_total


def _output(module: nn.Module, call: _Call, child: str) -> torch.Tensor:
    """Return what a module or a part of it computes in a call of the module."""
    if not child:
        return _first(module(*call.args, **call.kwargs))
    with _recorded(module, [child]) as calls:
        module(*call.args, **call.kwargs)
    return calls[child].output


def _shape(part: Division) -> str:
    """Return what parts have in common of which one is proven for all."""
    return repr(replace(part, module_name=""))


@contextmanager
def _recorded(model: nn.Module, names: Sequence[str]) -> Iterator[dict[str, _Call]]:
    """Record the calls of some modules."""
    calls: dict[str, _Call] = {}

    def record(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[name] = _Call(args, kwargs, _first(output))

        return hook

    handles = [
        model.get_submodule(name).register_forward_hook(record(name), with_kwargs=True)
        for name in names
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _first(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found
