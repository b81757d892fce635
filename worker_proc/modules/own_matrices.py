"""Packs matrices that modules pass to `functional.linear` in their own code.

Examples are the matrices that mix streams of hyper-connections (GLM-5.3-Flash, Hy-V4). The run on
the meta device shows which modules have such matrices, and which rows they take. Each module must
reproduce its earlier results, on rows of three scales.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from worker_proc.loading.deferred_module import make_generator
from worker_proc.modules.packed_matrix import PackedMatrices, PackedMatrix
from worker_proc.modules.trial_attributes import keeps_attributes
from worker_proc.modules.trial_errors import TRIAL_FAILURES, TRIAL_SCALES, greatest, greatest_error
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary

_Arguments = Mapping[str, torch.Tensor]
NUM_TRIAL_ROWS = 5
_MIXING = {"paged_layer", "recurrent_layer"}
"""Attributes of modules that mix the tokens of a text; other code handles their matrices."""
MAX_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Relative to the greatest value of each result."""


@torch.inference_mode()
def pack_own_matrices(
    model: nn.Module,
    row_shapes: Mapping[str, Sequence[int]],
    library: NativeLibrary,
    dtype: torch.dtype,
    proven: Collection[str] | None = None,
) -> list[str]:
    """Pack the matrices of modules, given their row shapes by name; return the modules' names.

    The modules' elementwise functions then give a value the same bits at every position. `proven`
    is such a result of an earlier start; with it, nothing is tried.
    """
    packed = []
    modules = dict(model.named_modules())
    for name, shape in row_shapes.items():
        module = modules.get(name)  # None: a module around it was replaced
        if module is None or _MIXING.intersection(module.__dict__):
            continue
        if proven is not None and name not in proven:
            continue
        trials = [] if proven is not None else _trials({"": (1, NUM_TRIAL_ROWS, *shape)}, dtype)
        matrices = {n: p for n, p in module.named_parameters(recurse=False) if is_own_matrix(p)}
        if _pack(module, matrices, trials, library, MAX_ERROR.get(dtype, 0.0)):
            packed.append(name)
    return packed


@torch.inference_mode()
def pack_own_stacks(
    model: nn.Module,
    argument_shapes: Mapping[str, Mapping[str, Sequence[int]]],
    library: NativeLibrary,
    dtype: torch.dtype,
    proven: Collection[str] | None = None,
) -> list[str]:
    """Pack stacks of matrices, `[num_matrices, outputs, inputs]`, like `pack_own_matrices`.

    Shared experts of Inkling have such stacks. `argument_shapes` has the shapes of each module's
    arguments by name, "" for the first one, with 0 instead of the number of rows.
    """
    packed = []
    modules = dict(model.named_modules())
    for name, shapes in argument_shapes.items():
        module = modules.get(name)
        if module is None or (proven is not None and name not in proven):
            continue
        counted = {key: [size or NUM_TRIAL_ROWS for size in one] for key, one in shapes.items()}
        trials = [] if proven is not None else _trials(counted, dtype)
        stacks = {n: p for n, p in module.named_parameters(recurse=False) if p.dim() == 3}
        if _pack(module, stacks, trials, library, MAX_ERROR.get(dtype, 0.0)):
            packed.append(name)
    return packed


def _trials(shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> list[_Arguments]:
    """Return random arguments for each scale, by name; "" is the name of the first one."""
    generator = make_generator(1)
    given = {name: torch.randn(*shape, generator=generator) for name, shape in shapes.items()}
    return [
        {name: (one * scale).to(dtype) for name, one in given.items()} for scale in TRIAL_SCALES
    ]


def _called(module: nn.Module, given: _Arguments) -> tuple[torch.Tensor, ...]:
    return _results(module(given[""], **{name: one for name, one in given.items() if name}))


def _pack(
    module: nn.Module,
    matrices: Mapping[str, nn.Parameter],
    trials: Sequence[_Arguments],
    library: NativeLibrary,
    max_error: float,
) -> bool:
    """Pack the matrices of a module; undo it and return False if a trial's results differ."""
    if not matrices or any(m.is_meta or m.dtype not in NATIVE_DTYPES for m in matrices.values()):
        return False
    try:
        expected = [_called(module, given) for given in trials]
    except TRIAL_FAILURES:
        return False  # it takes other arguments
    packed = {
        name: (PackedMatrix if matrix.dim() == 2 else PackedMatrices)(library, matrix)
        for name, matrix in matrices.items()
    }

    def agrees() -> bool:
        found = [_called(module, given) for given in trials]
        pairs = zip(found, expected, strict=True)
        is_same = all(_agree(one, other, max_error) for one, other in pairs)
        return is_same and (not trials or all(matrix.is_used for matrix in packed.values()))

    return keeps_attributes(module, packed, agrees)


def is_own_matrix(parameter: nn.Parameter) -> bool:
    """Return whether a parameter has rows and columns."""
    return parameter.dim() == 2 and min(parameter.shape) > 1


def _results(out: object) -> tuple[torch.Tensor, ...]:
    results = out if isinstance(out, tuple) else (out,)
    if not all(isinstance(result, torch.Tensor) for result in results):
        raise TypeError("a module returns something other than tensors")
    return results


def _agree(
    found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], max_error: float
) -> bool:
    if [one.shape for one in found] != [one.shape for one in expected]:
        return False
    pairs = zip(found, expected, strict=True)
    return greatest(greatest_error(one.float(), two.float()) for one, two in pairs) <= max_error
