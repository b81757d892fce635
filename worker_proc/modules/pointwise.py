"""Norms and activations in one pass, in place of those that transformers computes in several.

Large values reveal bounds of an activation, such as a clamp; small rows reveal a norm's epsilon.
"""

from typing import Protocol

import torch
from torch import nn

from worker_proc.modules.gated_norm import is_gated
from worker_proc.modules.trial_candidates import MAX_ERROR, NUM_TRIAL_ROWS, closest_candidate
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.structures import Activation

NUM_TRIAL_VALUES = 492  # together with the large values, a multiple of the rows
TRIAL_RANGE = 9.0
"""Activations are nonlinear in this range. Beyond it they are 0 or their argument, which is tried
with LARGE_VALUES."""
LARGE_VALUES = (10.5, 30.0, 1e3, 1e5)


class PointwiseKernels(Protocol):
    """Kernels for norms and activations, on the CPU or a GPU."""

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float, round_first: bool
    ) -> torch.Tensor:
        """Normalize the last dimension, and multiply it by `weight`, which is float32."""

    def activate(self, hidden: torch.Tensor, activation: Activation) -> torch.Tensor:
        """Apply an activation to every value."""


class FusedRMSNorm(nn.Module):
    """Root-mean-square normalization in one pass."""

    def __init__(
        self,
        library: PointwiseKernels,
        factors: torch.Tensor,
        epsilon: float,
        dtype: torch.dtype,
        *,
        round_first: bool,
    ) -> None:
        super().__init__()
        # Models read the dtype of their weights, and convert rows to it.
        self.weight = torch.empty(len(factors), dtype=dtype, device="meta")
        self.factors = factors.detach().float().contiguous()
        self.epsilon = epsilon
        self.round_first = round_first
        self._library = library

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._library.rms_norm(hidden, self.factors, self.epsilon, self.round_first)


class FusedActivation(nn.Module):
    """An activation in one pass."""

    def __init__(self, library: NativeLibrary, activation: Activation) -> None:
        super().__init__()
        self._library = library
        self._activation = activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._library.activate(hidden, self._activation)


@torch.inference_mode()
def fused_norm(
    module: nn.Module, library: PointwiseKernels, dtype: torch.dtype, number: int | None = None
) -> tuple[int, FusedRMSNorm] | None:
    """Return the number and module of the kernel that agrees with a norm; None: no kernel does."""
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = dict(module.named_parameters())
    is_leaf = next(module.children(), None) is None and not is_gated(module)
    if not is_leaf or set(parameters) != {"weight"} or not isinstance(epsilon, float):
        return None
    weight = parameters["weight"]
    if weight.dim() != 1 or weight.dtype != dtype:
        return None
    candidates = {
        0: lambda: FusedRMSNorm(library, weight, epsilon, dtype, round_first=True),
        1: lambda: FusedRMSNorm(library, weight, epsilon, dtype, round_first=False),
        2: lambda: FusedRMSNorm(library, weight.float() + 1.0, epsilon, dtype, round_first=False),
    }
    return closest_candidate(module, len(weight), candidates, number)


def activation_of(
    function: object,
    library: PointwiseKernels,
    device: torch.device | None = None,
    *,
    number: int | None = None,
) -> Activation | None:
    """Return the activation that a module or function computes; it is tried in float32.

    `number` is set if an earlier start has proven the activation.
    """
    if not callable(function):
        return None
    if number is not None:
        return Activation(number)
    values = torch.linspace(-TRIAL_RANGE, TRIAL_RANGE, NUM_TRIAL_VALUES)
    large = torch.tensor([*LARGE_VALUES, *(-value for value in LARGE_VALUES)])
    values = torch.cat([values, large]).view(1, NUM_TRIAL_ROWS, -1).to(device or values.device)
    try:
        expected = function(values)
    except Exception:
        return None  # it takes other arguments
    if not isinstance(expected, torch.Tensor) or expected.shape != values.shape:
        return None
    for activation in Activation:
        error = (library.activate(values, activation) - expected).abs()
        if bool((error <= MAX_ERROR[torch.float32] * expected.abs().clamp(min=1.0)).all()):
            return activation
    return None
