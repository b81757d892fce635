"""Replaces the gated norms of recurrent modules by a single-pass kernel.

In torch, a row's gates have other bits at the end of a tensor. The kind of norm that a module
computes is identified by its results on rows and gates of several scales.
"""

import inspect
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from worker_proc.loading.deferred_module import make_generator
from worker_proc.modules.trial_errors import greatest, greatest_error
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary
from worker_proc.native.recurrence import GatedNormArgs

NUM_TRIAL_ROWS = 5
TRIAL_SCALES = (0.01, 1.0, 30.0)
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Relative to the largest value: allows another order of sums, and one rounding."""


class Gating(NamedTuple):
    """How a norm is gated."""

    gates_first: bool
    """True if rows are multiplied by gates before they are normalized."""
    is_sigmoid: bool
    """True if gates are activated by sigmoid; False: by SiLU."""
    rounds_between: bool
    """True if normalized rows are rounded before they are multiplied by the weight."""


KINDS = [
    Gating(gates_first, is_sigmoid, rounds_between)
    for gates_first in (False, True)
    for is_sigmoid in (False, True)
    for rounds_between in (True, False)
]


class FusedGatedNorm(nn.Module):
    """A root-mean-square norm of groups of values, with gates."""

    def __init__(self, library: NativeLibrary, norm: nn.Module, gating: Gating) -> None:
        super().__init__()
        shape = _shape_of(norm)
        assert shape is not None
        weight, self._group_size, self._epsilon = shape
        self._weight = weight.detach().float().contiguous()
        self._gating = gating
        self._library = library

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Return `[..., size]`, in the dtype of `hidden_states`."""
        size = len(self._weight)
        rows = _dense(hidden_states.reshape(-1, size))
        gates = _dense(gate.to(rows.dtype).reshape(-1, size))
        out = torch.empty(hidden_states.shape, dtype=rows.dtype)
        self._library.gated_norm(
            GatedNormArgs(
                *(tensor.data_ptr() for tensor in (rows, gates, self._weight, out)),
                rows.stride(0),
                gates.stride(0),
                *(len(rows), size, self._group_size),
                rows.dtype == torch.bfloat16,
                *self._gating,
                self._epsilon,
            )
        )
        return out


def fuse_gated_norms(
    module: nn.Module, library: NativeLibrary, known: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Replace the gated norms among a module's children, if proven.

    Returns the number of each norm's gating, by name. `known` is such a result of an earlier start;
    with it, nothing is tried.
    """
    found: dict[str, int] = {}
    for name, child in list(module.named_children()):
        number = _kind_of(child, library) if known is None else known.get(name)
        if number is not None:
            setattr(module, name, FusedGatedNorm(library, child, KINDS[number]))
            found[name] = number
    return found


def is_gated(module: nn.Module) -> bool:
    """Return whether a module's forward takes gates."""
    return "gate" in inspect.signature(module.forward).parameters


def _shape_of(norm: nn.Module) -> tuple[torch.Tensor, int, float] | None:
    """Return the weight, group size and epsilon of a module that may be a gated norm, or None."""
    parameters = dict(norm.named_parameters())
    epsilon = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    weight = parameters.get("weight")
    if len(parameters) != 1 or weight is None or weight.dim() != 1 or weight.is_meta:
        return None
    group_size = getattr(norm, "group_size", len(weight) // getattr(norm, "n_groups", 1))
    if not isinstance(epsilon, float) or len(weight) % group_size:
        return None
    return weight, group_size, epsilon


@torch.inference_mode()
def _kind_of(norm: nn.Module, library: NativeLibrary) -> int | None:
    """Return the number of the gating that agrees best with a module; None: none agrees."""
    shape = _shape_of(norm) if is_gated(norm) else None
    if shape is None or shape[0].dtype not in NATIVE_DTYPES:
        return None
    weight = shape[0]
    generator = make_generator(1)
    size = 1, NUM_TRIAL_ROWS, len(weight)
    trials = [
        ((torch.randn(size, generator=generator) + 1.0) * scale).to(weight.dtype)
        for scale in TRIAL_SCALES
    ]
    gates = [torch.randn(size, generator=generator).to(weight.dtype) * 3.0 for _ in trials]
    try:
        expected = [norm(*pair).float() for pair in zip(trials, gates, strict=True)]
    except (TypeError, AttributeError, RuntimeError):
        return None  # a module with another interface
    best, min_error = None, MAX_ERROR[weight.dtype]
    for number, gating in enumerate(KINDS):
        fused = FusedGatedNorm(library, norm, gating)
        found = [fused(*pair).float() for pair in zip(trials, gates, strict=True)]
        error = greatest(greatest_error(*pair) for pair in zip(found, expected, strict=True))
        if error <= min_error:
            best, min_error = number, error
    return best


def _dense(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()
