"""Takes modules that transformers computes in many passes to kernels that need one.

Which modules qualify is not read off their names: a candidate's own forward is run on random
rows and must agree with the kernel, otherwise the module stays as it is.

The kernels treat every row alike. What torch computes value by value it does in vectors, and the
rest of a tensor in another way: there a row's bits can depend on its place.
"""

from collections.abc import Callable
from itertools import chain

import torch
from torch import nn

from worker_proc.native.kernels import NATIVE_DTYPES, Activation, NativeLibrary
from worker_proc.packed_linear import PackedLinear

NUM_TRIAL_ROWS = 5
NUM_TRIAL_VALUES = 500
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Relative to the largest value: the order of a sum, and one rounding."""
TRIAL_RANGE = 9.0
"""Past it, activations are 0 or their argument."""


class FusedRMSNorm(nn.Module):
    """Root-mean-square normalization in one pass."""

    def __init__(
        self, library: NativeLibrary, weight: torch.Tensor, epsilon: float, round_first: bool
    ) -> None:
        """Take the factors of each column, `weight`, and the kernel's other arguments."""
        super().__init__()
        self.weight = weight.detach().float().contiguous()
        self._library = library
        self._epsilon = epsilon
        self._round_first = round_first

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalize the last dimension."""
        return self._library.rms_norm(hidden, self.weight, self._epsilon, self._round_first)


class FusedActivation(nn.Module):
    """An activation in one pass."""

    def __init__(self, library: NativeLibrary, activation: Activation) -> None:
        super().__init__()
        self._library = library
        self._activation = activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Apply it to every value."""
        return self._library.activate(hidden, self._activation)


class FusedMLP(nn.Module):
    """down(f(gate(x)) · up(x)), with one packed matrix for gate and up."""

    def __init__(
        self,
        library: NativeLibrary,
        activation: Activation,
        gate: nn.Linear,
        up: nn.Linear,
        down: nn.Linear,
    ) -> None:
        """Pack the three layers."""
        super().__init__()
        bias = None if gate.bias is None else torch.cat([gate.bias, up.bias])
        self.gate_up_proj = PackedLinear(torch.cat([gate.weight, up.weight]), bias)
        self.down_proj = PackedLinear(down.weight, down.bias)
        self._library = library
        self._activation = activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the rows of `[..., hidden_size]`."""
        gate_up = self.gate_up_proj(hidden)
        product = self._library.activate(gate_up, self._activation, multiplies=True)
        out: torch.Tensor = self.down_proj(product)
        return out


def fuse_modules(model: nn.Module, library: NativeLibrary, dtype: torch.dtype) -> int:
    """Replace what can be replaced in `model`, before its linear layers are packed.

    Returns:
        The number of modules replaced.
    """
    num_fused = 0
    gone: set[nn.Module] = set()
    for parent in list(model.modules()):
        for name, child in () if parent in gone else parent.named_children():
            fused = _fused(child, library, dtype)
            if fused is not None:
                setattr(parent, name, fused)
                gone.update(child.modules())
                _release(child)
                num_fused += 1
    return num_fused


def _release(module: nn.Module) -> None:
    """Drop the weights of a replaced module, which lists of modules may keep alive."""
    for part in module.modules():
        for name, _ in list(part.named_parameters(recurse=False)):
            delattr(part, name)


@torch.inference_mode()
def _fused(module: nn.Module, library: NativeLibrary, dtype: torch.dtype) -> nn.Module | None:
    if dtype not in NATIVE_DTYPES:
        return None
    names = {name for name, _ in module.named_children()}
    if {"gate_proj", "up_proj", "down_proj"} <= names <= _MLP_CHILDREN:
        return _fused_mlp(module, library)
    if not names and next(chain(module.parameters(), module.buffers()), None) is None:
        return _fused_activation(module, library)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    parameters = dict(module.named_parameters())
    if names or set(parameters) != {"weight"} or not isinstance(epsilon, float):
        return None
    weight = parameters["weight"]
    if weight.dim() != 1 or weight.dtype != dtype:
        return None
    return _agreeing(
        module,
        [
            lambda: FusedRMSNorm(library, weight, epsilon, round_first=True),
            lambda: FusedRMSNorm(library, weight.float() + 1.0, epsilon, round_first=False),
        ],
        len(weight),
    )


_MLP_CHILDREN = frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"})


def _fused_mlp(module: nn.Module, library: NativeLibrary) -> nn.Module | None:
    gate, up, down = module.gate_proj, module.up_proj, module.down_proj
    if not (
        isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)
    ):
        return None
    activation = _activation_of(getattr(module, "act_fn", None), library)
    if activation is None:
        return None
    candidates: list[Callable[[], nn.Module]] = [
        lambda: FusedMLP(library, activation, gate, up, down)
    ]
    return _agreeing(module, candidates, gate.in_features)


def _fused_activation(module: nn.Module, library: NativeLibrary) -> nn.Module | None:
    activation = _activation_of(module, library)
    return None if activation is None else FusedActivation(library, activation)


def _activation_of(function: object, library: NativeLibrary) -> Activation | None:
    """Return which activation a module or function computes; tried in float32."""
    if not callable(function):
        return None
    values = torch.linspace(-TRIAL_RANGE, TRIAL_RANGE, NUM_TRIAL_VALUES)
    values = values.view(1, NUM_TRIAL_ROWS, -1)
    try:
        expected = function(values)
    except Exception:
        return None  # it takes something else
    if not isinstance(expected, torch.Tensor) or expected.shape != values.shape:
        return None
    for activation in Activation:
        error = (library.activate(values, activation) - expected).abs().max()
        if error <= MAX_ERROR[torch.float32]:
            return activation
    return None


def _agreeing(
    module: nn.Module, candidates: list[Callable[[], nn.Module]], size: int
) -> nn.Module | None:
    """Return the first candidate that computes what `module` does."""
    dtype = next(module.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    # Off zero, so that a norm that subtracts the mean does not pass.
    rows = (torch.randn(1, NUM_TRIAL_ROWS, size, generator=generator) + 1.0).to(dtype)
    try:
        expected = module(rows)
    except (TypeError, RuntimeError):
        return None  # a module of another interface
    for make in candidates:
        candidate = make()
        error = (candidate(rows).float() - expected.float()).abs().max()
        if error <= MAX_ERROR[dtype] * expected.float().abs().max():
            return candidate
    return None
