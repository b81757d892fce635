"""Replaces modules that transformers computes in many passes by single-pass kernels.

Modules do not qualify by their names: a candidate's own forward runs on random rows, small,
ordinary and large. If it does not agree with the kernel, the module is kept. Large rows reveal
bounds, such as a clamp of the gate; small rows reveal a norm's epsilon.

The kernels compute every row alike. torch computes elementwise functions in vectors, and the end of
a tensor differently, so a row's bits can depend on its position in the tensor.
"""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Protocol, TypeVar

import torch
from torch import nn

from worker_proc.loading.deferred_module import make_generator
from worker_proc.modules.coded_weights import dequantized, pack_weight, takes_row_codes
from worker_proc.modules.experts import (
    FusedExperts,
    Routing,
    computing_expert_codes,
    expert_weights,
    round_experts,
)
from worker_proc.modules.gated_norm import is_gated
from worker_proc.modules.grouped_experts import GroupedExperts, fused_grouped_experts
from worker_proc.modules.own_experts import pack_own_experts
from worker_proc.modules.own_gated_experts import OwnGatedExperts, own_gated_experts
from worker_proc.modules.packed_linear import computing_codes, make_linear, round_linears
from worker_proc.modules.restacked_experts import restacked
from worker_proc.modules.router import install_router
from worker_proc.modules.scaled_experts import scaled_experts
from worker_proc.modules.trial_errors import greatest
from worker_proc.native.instructions import projection
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary
from worker_proc.native.packed_weights import Format
from worker_proc.native.structures import Activation, Epilogue

NUM_TRIAL_ROWS = 5
NUM_MIXTURE_ROWS = 64
MIXTURE_QUANTILE = {torch.float32: 0.98, torch.bfloat16: 0.9}
"""Share of a mixture's rows that must agree: in float32, all but one of 64.

If the logits of two experts are equal within their rounding, a row may choose the other expert, or
weight them differently.
"""
NUM_TRIAL_VALUES = 492  # together with the large values, a multiple of the rows
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}
"""Relative to the largest value: allows another order of sums, and one rounding."""
TRIAL_SCALES = (0.01, 1.0, 30.0, 1e4)  # of the random rows
TRIAL_RANGE = 9.0
"""Activations are nonlinear in this range. Beyond it they are 0 or their argument, which is tried
with LARGE_VALUES."""
LARGE_VALUES = (10.5, 30.0, 1e3, 1e5)
_MLP_CHILDREN = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
_ACTIVATIONS = {"act_fn", "activation_fn"}
SCALED_KEY = " scaled"
"""Suffix, after the mixture's path, of the key of a mixture whose experts take scaled rows."""
ROUTER_KEY = " router"
"""Suffix, after the parent's path, of a router's key among the proven modules."""
Module = TypeVar("Module", bound=nn.Module)
OWN_GATE = -1
"""The kernel number of experts whose gates the module's own code computes."""
OWN_FORWARD = -2
"""The kernel number of experts whose own forward multiplies by packed matrices."""
_Fused = tuple[int, nn.Module]
"""The number of a kernel among those of its kind, and the module that uses it."""


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


class FusedMLP(nn.Module):
    """down(f(gate(x)) · up(x)), with one packed matrix for gate and up."""

    def __init__(
        self,
        library: NativeLibrary,
        activation: Activation,
        gates: tuple[torch.Tensor, torch.Tensor | None],
        down: tuple[torch.Tensor, torch.Tensor | None],
        format: Format = Format.UNITS,
    ) -> None:
        """Pack weights and biases; `gates` is `[2 * size, in_features]`, gates before factors."""
        super().__init__()
        weight, bias = gates
        self.gate_up = pack_weight(library, weight, bias, format, gates=True)
        self.down_proj = make_linear(*down, library, format)
        self.activation = activation
        self.size = len(weight) // 2
        self._library = library
        self._instruction = projection(
            self.gate_up, epilogue=Epilogue.ACTIVATE, activation=activation
        )
        self._width = self.gate_up.num_outputs // 2
        self._splitting = projection(self.gate_up, epilogue=Epilogue.SPLIT, column=self._width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        order = self.gate_up.order
        product = self._library.project(self._instruction, hidden, self._width, order)
        product = product[:, : self.size]
        out: torch.Tensor = self.down_proj(product.view(*hidden.shape[:-1], self.size))
        return out

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return gates and factors, `[rows, size]` each, without multiplying them."""
        order = self.gate_up.order
        both = self._library.project(self._splitting, rows, 2 * self._width, order)
        return both[:, : self.size], both[:, self._width : self._width + self.size]

    def join(self, gates: torch.Tensor, factors: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """Return the output of `forward` for these gates and factors, `[*shape, hidden_size]`.

        Both methods round at the same points, and so have the same bits.
        """
        product = self._library.activate(gates, self.activation) * factors
        out: torch.Tensor = self.down_proj(product.view(*shape, self.size))
        return out


def fuse_modules(
    model: nn.Module,
    library: NativeLibrary,
    dtype: torch.dtype,
    proven: Mapping[str, int] | None = None,
    *,
    format: Format = Format.UNITS,
    on_tried: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, int]:
    """Replace modules for which a kernel is proven; call it before packing.

    Returns the number of each replaced module's kernel, by the module's name, and the output width
    of routers. `proven` is such a result of an earlier start; with it, nothing is tried. Calls
    `on_tried(done, total)` with the number of modules whose children have been tried.
    """
    fused: dict[str, int] = {}
    gone: set[nn.Module] = set()
    made: dict[tuple[int, ...], nn.Module] = {}
    """Replacements by kernel number and parameters, since modules may be tied."""
    parents = list(model.named_modules())
    for done, (path, parent) in enumerate(parents):
        on_tried(done, len(parents))
        if parent not in gone:
            fused |= _with_scaled_experts(
                parent, path, library, dtype=dtype, proven=proven, format=format, gone=gone
            )
        for name, child in () if parent in gone else parent.named_children():
            child_path = f"{path}.{name}".lstrip(".")
            if proven is not None and child_path not in proven:
                continue
            parameters = tuple(map(id, child.parameters()))
            number = None if proven is None else proven[child_path]
            found = _fused(child, library, dtype, number, format)
            if found is None and _packs_own_experts(child, library, number, format):
                fused[child_path] = OWN_FORWARD
                fused |= _with_router(parent, path, library, dtype, proven)
            elif found is not None:
                fused[child_path], replacement = found
                if parameters:
                    replacement = made.setdefault((found[0], *parameters), replacement)
                setattr(parent, name, replacement)
                if isinstance(replacement, GroupedExperts | OwnGatedExperts):
                    fused |= _with_router(parent, path, library, dtype, proven)
                gone.update(child.modules())
                for part in child.modules():  # other references may exist: drop their weights
                    part._parameters.clear()
    return fused


def _with_scaled_experts(
    parent: nn.Module,
    path: str,
    library: NativeLibrary,
    *,
    dtype: torch.dtype,
    proven: Mapping[str, int] | None,
    format: Format,
    gone: set[nn.Module],
) -> dict[str, int]:
    """Replace experts with a different interface: their rows are already multiplied by scores."""
    key = f"{path}{SCALED_KEY}"
    own = dict(parent.named_children()).get("experts")
    if own is None or dtype not in NATIVE_DTYPES or (proven is not None and key not in proven):
        return {}
    number = None if proven is None else proven[key]
    of = partial(activation_of, library=library, number=number)
    experts = scaled_experts(parent, library, of, format, is_proven=number is not None)
    if experts is None:
        return {}
    gone.add(own)
    own._parameters.clear()
    activation = experts.products.gating.activation
    return {key: int(activation)} | _with_router(parent, path, library, dtype, proven)


def _with_router(
    parent: nn.Module,
    path: str,
    library: NativeLibrary,
    dtype: torch.dtype,
    proven: Mapping[str, int] | None,
) -> dict[str, int]:
    """Make a router compute each row independently of the other rows; see router.py."""
    key = f"{path}{ROUTER_KEY}"
    if proven is not None and key not in proven:
        return {}
    width = install_router(parent, library, dtype, None if proven is None else proven[key])
    return {} if width is None else {key: width}


@torch.inference_mode()
def _fused(
    module: nn.Module,
    library: NativeLibrary,
    dtype: torch.dtype,
    number: int | None,
    format: Format,
) -> _Fused | None:
    """Return a module's kernel; `number` is set if it has been proven before."""
    if dtype not in NATIVE_DTYPES or number == OWN_FORWARD:
        return None
    names = {name for name, _ in module.named_children()}
    if names - _ACTIVATIONS in _MLP_CHILDREN:
        return _fused_mlp(module, library, number, format)
    if names == {"gate", "experts"}:
        return _fused_experts(module, library, number, format)
    if getattr(module, "down_proj", None) is not None and not names - _ACTIVATIONS:
        return _fused_grouped(module, library, number, format)
    if format is Format.UNITS and (experts := restacked(module)) is not None:
        return _fused_grouped(experts, library, number, format)
    if not names and next(chain(module.parameters(), module.buffers()), None) is None:
        activation = activation_of(module, library, number=number)
        return None if activation is None else (activation, FusedActivation(library, activation))
    return fused_norm(module, library, dtype, number)


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
    return _agreeing(module, len(weight), candidates, number)


def _fused_mlp(
    module: nn.Module, library: NativeLibrary, number: int | None, format: Format
) -> _Fused | None:
    parts = dict(module.named_children())
    function = parts.get("act_fn", parts.get("activation_fn"))
    activation = activation_of(function, library, number=number)
    if activation is None:
        return None
    before = [(part, part.weight) for part in parts.values() if isinstance(part, nn.Linear)]
    if format is not Format.UNITS and number is None:
        round_linears(parts.values(), library, format)  # to values that codes represent
    gates, down = _gates_of(parts), parts["down_proj"]
    fused = None
    if gates is not None and isinstance(down, nn.Linear):
        back = down.weight, down.bias  # weights as they are now; the trial dequantizes the module
        candidates = {int(activation): lambda: FusedMLP(library, activation, gates, back, format)}
        coded = [part for part in parts.values() if _takes_row_codes(part, format)]
        with ExitStack() as stack:
            if number is None:
                if format is Format.INT8:  # its codes represent no values of bfloat16
                    stack.enter_context(computing_codes(parts.values(), of_rows=False))
                stack.enter_context(computing_codes(coded))
                stack.enter_context(dequantized(module))
            fused = _agreeing(module, gates[0].shape[1], candidates, number)
    if fused is None:  # rounded copies would stay until all modules have been tried
        for linear, weight in before:
            linear.weight = weight
    return fused


def _takes_row_codes(part: nn.Module, format: Format) -> bool:
    return isinstance(part, nn.Linear) and (
        format is Format.INT8_FOR_CODES or takes_row_codes(part.weight)
    )


def _fused_experts(
    module: nn.Module, library: NativeLibrary, number: int | None, format: Format
) -> _Fused | None:
    """Return a mixture of experts; its number encodes the activation and the router's weighting.

    With codes, the experts' weights are also rounded in the module.
    """
    weights = expert_weights(module)
    if weights is None:
        return None
    router, experts = module.get_submodule("gate"), module.get_submodule("experts")
    num_experts, hidden_size = weights.router.shape
    known = None if number is None else number // 4
    function = getattr(experts, "act_fn", None)
    activation = activation_of(function, library, number=known)
    num_chosen = getattr(router, "top_k", None)
    if activation is None or not isinstance(num_chosen, int) or num_chosen > num_experts:
        return None
    if number is None:
        weighting = _weighting(router, hidden_size, weights.router.dtype)
        if weighting is None:
            return None
        number = 4 * activation + weighting
    routing = Routing(num_chosen, bool(number & 2), bool(number & 1))
    if format is not Format.UNITS and known is None:
        del weights  # rounded copies replace them one by one
        round_experts(experts, library, format)
        weights = expert_weights(module)
        assert weights is not None
    make = partial(FusedExperts, library, activation, routing, weights, format)
    both = (weights.gate_up, weights.down)
    codes_rows = format is Format.INT8_FOR_CODES or all(map(takes_row_codes, both))
    with ExitStack() as stack:
        if known is None:
            if codes_rows or format is Format.INT8:
                stack.enter_context(computing_expert_codes(experts, of_rows=codes_rows))
            stack.enter_context(dequantized(experts))
        return _agreeing(
            module,
            hidden_size,
            {number: make},
            None if known is None else number,
            num_rows=NUM_MIXTURE_ROWS,
            quantile=MIXTURE_QUANTILE[weights.router.dtype],
        )


def _fused_grouped(
    module: nn.Module, library: NativeLibrary, number: int | None, format: Format
) -> _Fused | None:
    """Return a module for experts that keep their router, and the number of its activation."""
    found: GroupedExperts | OwnGatedExperts | None = None
    if number != OWN_GATE:
        function = getattr(module, "act_fn", None)
        activation = activation_of(function, library, number=number)
        is_proven = number is not None
        found = fused_grouped_experts(module, library, activation, format, is_proven=is_proven)
    if found is not None:
        return int(activation or Activation.SILU), found
    if format is Format.UNITS and number in (None, OWN_GATE):
        found = own_gated_experts(module, library, is_proven=number is not None)
    return None if found is None else (OWN_GATE, found)


def _packs_own_experts(
    module: nn.Module, library: NativeLibrary, number: int | None, format: Format
) -> bool:
    """Make a module's own forward multiply by packed matrices, if it computes experts."""
    if format is not Format.UNITS or number not in (None, OWN_FORWARD):
        return False
    return pack_own_experts(module, library, is_proven=number is not None)


def _weighting(router: nn.Module, size: int, dtype: torch.dtype) -> int | None:
    """Return 2 if the weights of the chosen experts add up to 1, plus 1 if they are rounded."""
    generator = make_generator(2)
    try:
        _, weights, _ = router(torch.randn(NUM_TRIAL_ROWS, size, generator=generator).to(dtype))
    except (TypeError, ValueError, AttributeError, RuntimeError):
        return None  # a module with another interface
    if not isinstance(weights, torch.Tensor):
        return None
    normalizes = bool(((weights.float().sum(dim=-1) - 1.0).abs() < MAX_ERROR[dtype]).all())
    return 2 * normalizes + (weights.dtype == dtype)


def _gates_of(parts: dict[str, nn.Module]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Return the weight and bias of the gates, followed by those of the factors."""
    whole = parts.get("gate_up_proj")
    if isinstance(whole, nn.Linear):
        return whole.weight, whole.bias
    gate, up = parts.get("gate_proj"), parts.get("up_proj")
    if not (isinstance(gate, nn.Linear) and isinstance(up, nn.Linear)):
        return None
    if gate.weight.shape != up.weight.shape or (gate.bias is None) != (up.bias is None):
        return None
    bias = None if gate.bias is None else torch.cat([gate.bias, up.bias])
    return torch.cat([gate.weight, up.weight]), bias


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


def _agreeing(
    module: nn.Module,
    size: int,
    candidates: Mapping[int, Callable[[], Module]],
    proven: int | None,
    *,
    num_rows: int = NUM_TRIAL_ROWS,
    quantile: float = 1.0,
) -> tuple[int, Module] | None:
    """Return the candidate that is closest to `module`, if it agrees at every scale.

    `proven` is the number of a candidate that is not tried. `quantile` is the share of rows whose
    error counts.
    """
    if proven is not None:
        return proven, candidates[proven]()
    parameter = next(module.parameters())
    dtype = parameter.dtype
    if parameter.is_meta:  # text does not reach it
        return None
    generator = make_generator(1)
    # Not centered at zero, so that a norm that subtracts the mean fails.
    rows = torch.randn(1, num_rows, size, generator=generator) + 1.0
    trials = [(rows * scale).to(parameter) for scale in TRIAL_SCALES]
    try:
        expected = [module(trial).float() for trial in trials]
    except (TypeError, AttributeError, RuntimeError):
        return None  # a module with another interface
    best, min_error = None, MAX_ERROR[dtype]
    for number, make in candidates.items():
        candidate = make()
        errors = [
            (candidate(trial).float() - want).abs().amax(dim=-1) / want.abs().max()
            for trial, want in zip(trials, expected, strict=True)
        ]
        error = greatest(float(row.quantile(quantile, interpolation="higher")) for row in errors)
        if error <= min_error:
            best, min_error = (number, candidate), error
    return best
