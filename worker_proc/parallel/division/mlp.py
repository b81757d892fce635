"""Divides the MLPs of a decoder layer among ranks, by inner columns.

An MLP may be a mixture: a rank then has some inner columns of each expert, and the whole router. A
layer may have several MLPs, such as the experts of Granite-4 and an MLP for all rows, or none.
"""

from collections.abc import Collection, Iterator, Sequence

from torch import nn

from worker_proc.parallel.division.matrices import fits, low_rank_terms, matrix_of
from worker_proc.parallel.division.module_division import Division
from worker_proc.parallel.share import Section, Share, refuse

_NAMES = ("mlp", "feed_forward", "block_sparse_moe", "shared_mlp", "mixer", "mlp_block")
"""The names of MLPs in a layer."""
_MLPS = (
    ("down_proj", "gate_proj", "up_proj"),
    ("down_proj", "gate_up_proj"),
    ("down_proj", "up_proj"),
    ("output_linear", "input_linear"),
    ("w2", "w1", "w3"),
    ("c_proj", "c_fc"),
    ("fc2", "fc1"),
)
"""The names of an MLP's matrices, the last matrix first.

The others are gates and factors, in two matrices or in one, or the only matrix before the
activation.
"""
_EXPERTS = (("down_proj", "gate_up_proj"), ("down_proj", "up_proj"))
_GATES_AND_FACTORS = ("gate_up_proj", "input_linear")
"""Matrices that have both gates and factors."""
_SHARED = ("shared_experts", "shared_expert")
"""MLPs of a mixture that compute all rows."""
_TERMS = ("gate_up_proj_adapter_list", "gate_up_proj")
"""A list of low-rank products, and the matrix to whose products they are added."""
_AFTER_SHARED_LAYER = "linear"
"""The matrix of a layer of Zamba for the rows of the shared layer; every rank has all of it."""
_ROUTERS = ("gate.", "router.", "shared_expert_gate.")
"""Prefixes of a router's parameters; all ranks choose the same experts."""
_AROUND_EXPERTS = ("fc1_latent_proj.", "fc2_latent_proj.weight")
"""Projections to narrower rows and back, in Nemotron-H: each rank multiplies its part of the
experts' sums. A bias of the second one is not allowed, since every rank would add it."""


def divide_mlps(
    model: nn.Module,
    layer: str,
    mixers: Collection[str],
    share: Share,
    inner: Collection[str] = (),
) -> Iterator[Division]:
    """Yield the divisions of a decoder layer's MLPs.

    `mixers` are the modules that are already divided: attention, and those with a state. `inner`
    are decoder layers within this layer, which are divided separately. Raises UnsupportedModel if
    an MLP cannot be divided.
    """
    module = model.get_submodule(layer)
    names = [
        f"{layer}.{key}"
        for key in _NAMES
        if getattr(module, key, None) is not None and f"{layer}.{key}" not in mixers
    ]
    for name in names:
        yield _divide_mlp(name, model.get_submodule(name), share)
    if names:
        return
    found = _matrices(module, "", [("fc2", "fc1")])  # the layer itself has them
    if found is not None:
        yield _checked(Division(layer, *found, summed="fc2"), share)
    elif _has_other_matrices(module, layer, [*mixers, *inner]):
        raise refuse(share, f"{layer}.mlp is missing")


def _divide_mlp(name: str, mlp: nn.Module, share: Share) -> Division:
    found = _matrices(mlp, "", _MLPS) or _matrices(mlp, "experts.", _EXPERTS)
    if found is None:
        raise refuse(share, f"{name} is not made of gates, factors and {_MLPS[0][0]}")
    for prefix in _SHARED:
        columns, outs = _matrices(mlp, f"{prefix}.", _MLPS) or ({}, {})
        found = found[0] | columns, found[1] | outs
    terms = low_rank_terms(mlp, *_TERMS)
    if terms:
        found[0].update(dict.fromkeys(terms, found[0][_TERMS[1]]))
    known = [*found[0], *found[1]]
    names = {f"{key}{suffix}" for key in known for suffix in ("", ".weight", ".bias", "_bias")}
    common = (*_ROUTERS, *_AROUND_EXPERTS, *([f"{_TERMS[0]}."] if terms else []))
    others = [key for key, _ in mlp.named_parameters() if not key.startswith(common)]
    if unknown := set(others) - names:
        raise refuse(share, f"{name}.{min(unknown)} is not known to be divided")
    return _checked(Division(name, *found), share)


def _checked(division: Division, share: Share) -> Division:
    for inner in division.outs.values():
        if not share.divides(inner.num_units):
            raise refuse(share, f"{division.module_name} has {inner.num_units} inner columns")
    return division


def _matrices(
    mlp: nn.Module, prefix: str, kinds: Sequence[tuple[str, ...]]
) -> tuple[dict[str, list[Section]], dict[str, Section]] | None:
    """Return the matrices divided by outputs and by inputs, for the first kind of MLP that fits."""
    for out, *columns in kinds:
        matrix = matrix_of(mlp, f"{prefix}{out}")
        if matrix is None:
            continue
        inner = Section(matrix.shape[-1], 1)
        sections = [inner]
        if columns[0] in _GATES_AND_FACTORS:
            owner = mlp.get_submodule(prefix.rstrip("."))
            is_interleaved = getattr(owner, "is_concatenated", True) is False
            sections = [Section(matrix.shape[-1], 2)] if is_interleaved else [inner, inner]
        found = {f"{prefix}{column}": sections for column in columns}
        if fits(mlp, found):
            return found, {f"{prefix}{out}": inner}
    return None


def _has_other_matrices(module: nn.Module, layer: str, mixers: Collection[str]) -> bool:
    """Return whether a layer has matrices outside of the modules whose division is known."""
    within = tuple(f"{one}." for one in (*mixers, f"{layer}.{_AFTER_SHARED_LAYER}"))
    names = [key for key, values in module.named_parameters() if values.dim() > 1]
    return any(not f"{layer}.{name}".startswith(within) for name in names)
