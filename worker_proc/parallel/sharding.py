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
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from worker_proc.adapters.sites import MatrixPart, Span
from worker_proc.attention.interface import transformers_attention
from worker_proc.attention.recorder import ProbedLayer
from worker_proc.calibration.self_check import check_texts, max_error
from worker_proc.errors import UnsupportedModel
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.loading.loader import CheckedModel, LoadedModel, rehearse
from worker_proc.loading.model_kind import ModelKind
from worker_proc.modules.packed_linear import output_layer
from worker_proc.native.kernels import NATIVE_DTYPES

ATTENTION_OUT, MLP_OUT = "o_proj", "down_proj"
_MLPS = (
    (MLP_OUT, "gate_proj", "up_proj"),
    (MLP_OUT, "gate_up_proj"),
    ("experts.down_proj", "experts.gate_up_proj"),
)
"""The last matrix of an MLP, and those before it: gates and factors, apart or in one."""
_ROUTER = ("gate.weight", "gate.bias")
"""Of experts; all ranks choose alike."""


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
    """How a module is divided: by outputs of some matrices, and by inputs of the last.

    A matrix is a linear layer, or the parameter with those of all experts.
    """

    module_name: str
    columns: dict[str, list[Section]]
    """By the names of the matrices in the module."""
    out: str
    inputs: Section
    by_head: tuple[str, ...] = ()
    """Parameters with a value for each head."""
    spec: LayerSpec | None = None
    """Of an attention module."""

    def apply(self, module: nn.Module, share: Share) -> None:
        """Leave a rank's part in the module."""
        for name, sections in self.columns.items():
            _keep_outputs(module, name, sections, share)
        _keep_inputs(module, self.out, self.inputs, share)
        for name in self.by_head:
            kept = share.of(self.inputs.num_units)
            values = getattr(module, name)[kept.start : kept.stop]
            setattr(module, name, _parameter(values.clone()))
        if self.spec is not None:
            _set_counts(module, divide_spec(self.spec, share))

    def parts(self, share: Share) -> Iterator[tuple[str, MatrixPart]]:
        """Yield the names of the divided matrices, and what a rank has of them."""
        for name, sections in self.columns.items():
            first, spans = 0, []
            for section in sections:
                spans.append(_span(section, share, first))
                first += section.num_units * section.unit
            yield f"{self.module_name}.{name}", MatrixPart(spans)
        yield f"{self.module_name}.{self.out}", MatrixPart(inputs=_span(self.inputs, share))


def check_division(checked: CheckedModel, share: Share) -> None:
    """Raise UnsupportedModel if a model cannot be divided, before its weights are read."""
    probed, device = checked.inspected.probed, checked.device.type
    if device != "cpu":
        raise _refuse(share, f"it works on the CPU only, and the device is {device}")
    if probed.recurrent:
        raise _refuse(share, f"{probed.recurrent[0].module_name} has a recurrent state")
    if checked.files is not None:
        raise _refuse(share, "the checkpoint is quantized")
    if checked.inspected.dtype not in NATIVE_DTYPES:
        dtype = str(checked.inspected.dtype).removeprefix("torch.")
        raise _refuse(share, f"ranks exchange float32 and bfloat16, and the dtype is {dtype}")
    if checked.inspected.kind is not ModelKind.GENERATES or not checked.is_causal:
        raise _refuse(share, "the model does not generate text by attention")
    _divide(rehearse(checked), probed.layers, share)


def shard(loaded: LoadedModel, share: Share) -> tuple[LoadedModel, dict[str, MatrixPart]]:
    """Leave a rank's part of the matrices in a loaded model, whose weights are not packed yet.

    Also returns the parts, by the names of the matrices. `check_division` has allowed it.
    UnsupportedModel: the parts of a module do not add up to it.
    """
    divisions = _divide(loaded.model, loaded.layers, share)
    _prove(loaded, divisions, share.num_ranks)
    for part in divisions:
        part.apply(loaded.model.get_submodule(part.module_name), share)
    _divide_head(loaded, share)
    layers = [replace(layer, spec=divide_spec(layer.spec, share)) for layer in loaded.layers]
    parts = dict(pair for division in divisions for pair in division.parts(share))
    return replace(loaded, layers=layers), parts


def _span(section: Section, share: Share, first: int = 0) -> Span:
    begin = share.of(section.num_units).start * section.unit
    return Span(first + begin, section.num_units * section.unit)


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


def layer_name(layer: ProbedLayer) -> str:
    """Return the name of the decoder layer of an attention module."""
    return layer.module_name.rpartition(".")[0]


def _refuse(share: Share, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"tensor_parallel_size {share.num_ranks}: {reason}")


def _divide(model: nn.Module, layers: Sequence[ProbedLayer], share: Share) -> list[Division]:
    """Return how the layers are divided; the model may be without values."""
    return [part for layer in layers for part in _divide_layer(model, layer, share)]


def _divide_layer(model: nn.Module, layer: ProbedLayer, share: Share) -> Iterator[Division]:
    spec, name = layer.spec, layer.module_name
    attention = model.get_submodule(name)
    num_heads, num_kv_heads = spec.num_heads, spec.num_kv_heads
    if not share.divides(num_heads):
        raise _refuse(share, f"{name} has {num_heads} heads")
    if not share.divides(num_kv_heads) and share.num_ranks % num_kv_heads:
        raise _refuse(share, f"{name} has {num_kv_heads} KV heads")
    if layer.biases is not None or spec.is_latent or spec.kv_source is not None:
        raise _refuse(share, f"{name} has biases, latent rows or keys of another layer")
    queries = Section(num_heads, spec.head_dim)
    keys = Section(num_kv_heads, spec.head_dim)
    values = Section(num_kv_heads, spec.value_head_dim)
    choices = (
        {"q_proj": [queries], "k_proj": [keys], "v_proj": [values]},
        {"qkv_proj": [queries, keys, values]},
    )
    inputs = Section(num_heads, spec.value_head_dim)
    columns = _find(attention, choices, ATTENTION_OUT, inputs)
    if columns is None:
        raise _refuse(share, f"{name} is not made of queries, keys, values and {ATTENTION_OUT}")
    sinks = () if layer.sinks is None else (layer.sinks.rpartition(".")[2],)
    _check_others(share, name, attention, {*columns, ATTENTION_OUT, *sinks}, spec)
    yield Division(name, columns, ATTENTION_OUT, inputs, sinks, spec)
    yield _divide_mlp(model, f"{layer_name(layer)}.mlp", share)


def _divide_mlp(model: nn.Module, name: str, share: Share) -> Division:
    try:
        mlp = model.get_submodule(name)
    except AttributeError:
        raise _refuse(share, f"{name} is missing") from None
    for out, *columns in _MLPS:
        matrix = _matrix(mlp, out)
        inner = Section(0 if matrix is None else matrix.shape[-1], 1)
        sections = {column: [inner] * (2 if len(columns) == 1 else 1) for column in columns}
        if _find(mlp, [sections], out, inner) is None:
            continue
        if not share.divides(inner.num_units):
            raise _refuse(share, f"{name} has {inner.num_units} inner columns")
        others = [key for key, _ in mlp.named_parameters() if key not in _ROUTER]
        names = {f"{key}{suffix}" for key in (out, *columns) for suffix in ("", ".weight", ".bias")}
        if unknown := set(others) - names:
            raise _refuse(share, f"{name}.{min(unknown)} is not known to be divided")
        return Division(name, sections, out, inner)
    raise _refuse(share, f"{name} is not made of gates, factors and {MLP_OUT}")


def _find(
    module: nn.Module, choices: Sequence[dict[str, list[Section]]], out: str, inputs: Section
) -> dict[str, list[Section]] | None:
    """Return the first choice whose matrices are there and have these sizes; None: none is."""
    last = _matrix(module, out)
    if last is None or last.shape[-1] != inputs.num_units * inputs.unit:
        return None
    for columns in choices:
        sizes = {
            name: sum(part.num_units * part.unit for part in parts)
            for name, parts in columns.items()
        }
        found = {name: _matrix(module, name) for name in columns}
        if all(one is not None and one.shape[-2] == sizes[name] for name, one in found.items()):
            return columns
    return None


def _matrix(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return a matrix, or those of all experts, `[..., outputs, inputs]`; None: it is not there."""
    parent, _, last = name.rpartition(".")
    found = getattr(getattr(module, parent, None) if parent else module, last, None)
    if isinstance(found, nn.Parameter):
        return found.detach()
    return found.weight.detach() if type(found) is nn.Linear else None


def _check_others(
    share: Share, name: str, attention: nn.Module, divided: set[str], spec: LayerSpec
) -> None:
    """Refuse weights that are neither divided nor the same for every head, as norms of a head."""
    for key, parameter in attention.named_parameters():
        is_of_head = parameter.numel() in (spec.head_dim, spec.value_head_dim)
        if key.partition(".")[0] not in divided and not is_of_head:
            raise _refuse(share, f"{name}.{key} belongs to all heads at once")


def _keep_outputs(module: nn.Module, name: str, sections: Sequence[Section], share: Share) -> None:
    kept: list[int] = []
    first = 0
    for part in sections:
        units = share.of(part.num_units)
        kept += range(first + units.start * part.unit, first + units.stop * part.unit)
        first += part.num_units * part.unit
    outputs = torch.tensor(kept)
    matrix = _matrix(module, name)
    assert matrix is not None
    linear = _replace(module, name, matrix.index_select(-2, outputs))
    if linear is not None:
        linear.out_features = len(kept)
        if linear.bias is not None:
            linear.bias = _parameter(linear.bias.detach()[outputs])


def _keep_inputs(module: nn.Module, name: str, section: Section, share: Share) -> None:
    """Keep some inputs; rank 0 adds the bias, which the sum of all ranks contains once."""
    units = share.of(section.num_units)
    matrix = _matrix(module, name)
    assert matrix is not None
    kept = matrix[..., units.start * section.unit : units.stop * section.unit]
    linear = _replace(module, name, kept.clone(memory_format=torch.contiguous_format))
    if linear is not None:
        linear.in_features = kept.shape[-1]
        if share.rank > 0:
            linear.register_parameter("bias", None)


def _replace(module: nn.Module, name: str, matrix: torch.Tensor) -> nn.Linear | None:
    """Replace a matrix; returns the linear layer that has it, if one does."""
    parent, _, last = name.rpartition(".")
    owner = module.get_submodule(parent)
    found = getattr(owner, last)
    if isinstance(found, nn.Linear):
        found.weight = _parameter(matrix)
        return found
    setattr(owner, last, _parameter(matrix))
    return None


def _parameter(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


def _set_counts(attention: nn.Module, spec: LayerSpec) -> None:
    """Change the counts that attention modules keep, or read from their configuration."""
    counts = {
        "num_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "num_key_value_groups": spec.num_heads // spec.num_kv_heads,
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
    with transformers_attention(model):
        with _recorded(model, [part.module_name for part in shapes.values()]) as calls:
            text = check_texts(loaded.vocab_size)[0]
            model(input_ids=torch.tensor([text]), use_cache=False)
        for part in shapes.values():
            call = calls[part.module_name]
            found = torch.zeros(call.output.shape, dtype=torch.float32)
            for rank in range(num_ranks):
                share = Share(rank, num_ranks)
                module = copy.deepcopy(model.get_submodule(part.module_name))
                part.apply(module, share)
                try:
                    found += _first(module(*call.args, **call.kwargs)).float()
                except RuntimeError as error:
                    reason = f"a part of {part.module_name} cannot be computed ({error})"
                    raise _refuse(share, reason) from error
            expected = call.output.float()
            difference = float((found - expected).norm() / expected.norm().clamp_min(1e-6))
            if not difference <= max_error(loaded.dtype):
                raise UnsupportedModel(
                    f"tensor_parallel_size {num_ranks}: the parts of {part.module_name} do not add"
                    f" up to it (relative error {difference:.3g})"
                )


def _shape(part: Division) -> tuple[object, ...]:
    sections = tuple((name, *sections) for name, sections in part.columns.items())
    return (part.out, part.inputs, part.spec, sections)


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
