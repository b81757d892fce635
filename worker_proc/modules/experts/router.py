"""Makes a router of experts compute each row independently of the other rows.

The module that chooses the experts stays transformers' own. Its weights are packed, and it is
called with 16 rows or more, whose values fill whole vectors, few enough for one thread. Otherwise
torch would compute some values of a sigmoid in vectors and others one by one, depending on their
positions; the two round differently.
"""

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from worker_proc.loading.deferred_module import make_generator
from worker_proc.modules.packed_linear import make_linear
from worker_proc.modules.packed_matrix import PackedMatrix
from worker_proc.modules.trial_errors import TRIAL_FAILURES, greatest_error
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary

ROUTER_NAMES = ("gate", "router")
"""The names that a router has next to its experts."""
_TOKENS = "input_ids"
ROW_STEP = 16
VECTOR = 64  # a multiple of the values that torch computes in one pass
ONE_THREAD_VALUES = 32_768
"""With fewer values, torch computes an elementwise function in one thread."""
NUM_TRIAL_ROWS = 19
TRIAL_SCALES = (0.1, 1.0, 10.0)
MAX_ERROR = 0.02
"""The greatest error of a logit, relative to the greatest logit; they may be in bfloat16."""
Outputs = tuple[torch.Tensor, ...]


class RowBlocks:
    """Calls a function on blocks of rows, padded with zeros."""

    def __init__(self, function: Callable[..., Outputs], width: int) -> None:
        """`width` is the greatest number of values that it returns for a row."""
        self._function = function
        self._step = math.lcm(ROW_STEP, VECTOR // math.gcd(VECTOR, width))
        self._max_rows = max((ONE_THREAD_VALUES - 1) // (width * self._step), 1) * self._step

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Outputs:
        """Return tensors with a row for each row of `[..., hidden_size]`.

        Integer arguments are the tokens of these rows.
        """
        if hidden.dim() > 2:
            hidden = hidden.reshape(1, -1, hidden.shape[-1])
        found, end = [], 0
        for rows in hidden.split(self._max_rows, dim=-2):
            count = rows.shape[-2]
            missing = -count % self._step
            start, end = end, end + count
            own = [
                pad(arg.reshape(1, -1)[:, start:end], (0, missing)) if _are_tokens(arg) else arg
                for arg in args
            ]
            filled = pad(rows, (0, 0, 0, missing))
            found.append([part[:count] for part in self._function(filled, *own, **kwargs)])
        if len(found) == 1:
            return tuple(found[0])
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))


def _are_tokens(arg: object) -> bool:
    return isinstance(arg, torch.Tensor) and arg.dtype == torch.long


@torch.inference_mode()
def install_router(
    parent: nn.Module, library: NativeLibrary, dtype: torch.dtype, width: int | None
) -> int | None:
    """Pack the router next to the experts of `parent`, and call it in blocks of rows of `dtype`.

    Returns the greatest number of values that it returns for a row. `width` is this result of an
    earlier start; with it, nothing is tried. Returns None, and changes nothing, if there is no
    router with the expected interface.
    """
    router = next((m for n, m in parent.named_children() if n in ROUTER_NAMES), None)
    if router is None:
        return None
    forward = router.forward
    if width is None:
        width = _proven_width(parent, router, library, dtype)
    if width is None:
        return None
    for module, name, weight in list(_matrices(router)):
        del module._parameters[name]
        module.__dict__[name] = PackedMatrix(library, weight)
    for module in list(router.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Linear:  # not rounded, unlike other layers
                setattr(module, name, make_linear(child.weight, child.bias, library))
    router.__dict__["forward"] = RowBlocks(forward, width)
    return width


def _matrices(router: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the weights of a router outside its linear layers."""
    for module in router.modules():
        for name, parameter in module.named_parameters(recurse=False):
            is_matrix = parameter.dim() == 2 and len(parameter) > 1
            if type(module) is not nn.Linear and is_matrix:
                yield module, name, parameter


def _proven_width(
    parent: nn.Module, router: nn.Module, library: NativeLibrary, dtype: torch.dtype
) -> int | None:
    """Return the greatest width of a router's outputs, if blocks and packing agree with it."""
    matrices = list(_matrices(router))
    weight = next((p for p in router.parameters() if p.dim() == 2 and len(p) > 1), None)
    if weight is None or any(p.is_meta or p.dtype not in NATIVE_DTYPES for _, _, p in matrices):
        return None
    generator = make_generator(3)
    rows = torch.randn(NUM_TRIAL_ROWS, weight.shape[1], generator=generator)
    rows = rows.to(dtype)
    for trial in (rows, rows.unsqueeze(0)):  # some routers take a batch of texts
        widths = [_width(parent, router, matrices, library, trial * s) for s in TRIAL_SCALES]
        if None not in widths:
            return widths[0]
    return None


def _width(
    parent: nn.Module,
    router: nn.Module,
    matrices: list[tuple[nn.Module, str, nn.Parameter]],
    library: NativeLibrary,
    hidden: torch.Tensor,
) -> int | None:
    """Return the greatest output width if blocks and packing agree on `hidden`, else None."""
    try:
        args = _further_arguments(parent, router)
        expected = router(hidden, *args)
        if any(len(part) != NUM_TRIAL_ROWS for part in expected):
            return None
        width = max(part.shape[-1] for part in expected)
        with _packed(matrices, library):
            found = RowBlocks(router.forward, width)(hidden, *args)
    except TRIAL_FAILURES:
        return None  # it has another interface
    return width if _are_close(found, expected) else None


def _further_arguments(parent: nn.Module, router: nn.Module) -> list[Any]:
    """Return a router's arguments after the rows: attributes of its parent with the same names.

    If the parent has no such attribute, the router's default is used. Tokens are passed to routers
    that choose experts by a table (DeepSeek-V4).
    """
    tokens = {_TOKENS: torch.arange(NUM_TRIAL_ROWS).unsqueeze(0)}
    _, *others = inspect.signature(router.forward).parameters.values()
    empty = inspect.Parameter.empty
    return [
        tokens[one.name]
        if one.name in tokens
        else getattr(parent, one.name)
        if one.default is empty
        else getattr(parent, one.name, one.default)
        for one in others
    ]


@contextmanager
def _packed(
    matrices: list[tuple[nn.Module, str, nn.Parameter]], library: NativeLibrary
) -> Iterator[None]:
    """Replace weights by packed ones within the context."""
    for module, name, weight in matrices:
        module.__dict__[name] = PackedMatrix(library, weight)
    try:
        yield
    finally:
        for module, name, _ in matrices:
            del module.__dict__[name]


def _are_close(found: Outputs, expected: Outputs) -> bool:
    """Return whether the first outputs, which are logits or their scores, agree in every row."""
    if [part.shape for part in found] != [part.shape for part in expected]:
        return False
    return greatest_error(found[0].float(), expected[0].float()) <= MAX_ERROR
