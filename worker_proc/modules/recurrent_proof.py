"""Compares recurrent modules over packed rows with their own forward over single texts.

Both are computed in float32, for texts of several scales. The module's own forward computes a text
at once, in chunks. Packed rows are computed in steps with other boundaries, whose states move
between blocks.
"""

import copy
import math
from array import array
from inspect import Parameter, signature
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from worker_proc.inputs import StepInputs
from worker_proc.loading.deferred_module import make_generator
from worker_proc.loading.transformers_log import quiet_transformers
from worker_proc.modules.coded_weights import dequantized
from worker_proc.modules.left_factors import ObservedProducts
from worker_proc.modules.trial_errors import TRIAL_SCALES, row_errors
from worker_proc.modules.trial_texts import STEPS, compute_in_steps
from worker_proc.native.kernels import NativeLibrary
from worker_proc.recurrent.layers import install, make_layer
from worker_proc.recurrent.lightning import is_lightning, widen_decays
from worker_proc.recurrent.rowwise import RowwiseFunctions
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.state_spec import RecurrentSpec

MAX_ERROR = 1e-3
"""The greatest error of a row, relative to its norm: chunks and tokens are summed in other
orders."""
FEW_ROWS = 0.02
"""The share of rows whose errors may be greater: if a state has nearly faded, a norm enlarges the
rounding of what is left."""
MAX_RATIO_OF_FEW = 10.0
"""How many times greater these may be."""
_BLOCK_SIZE = 8


class Observed(NamedTuple):
    """Functions and weights that the own forward of a recurrent module uses."""

    uses_functions: bool
    """True if it calls elementwise torch functions on its rows."""
    left_factors: list[str]
    """Names of the weights that it multiplies columns by, from the left."""
    right_factors: list[str]
    """Names of the per-head weights that it multiplies rows by."""
    added: list[str]
    """Names of the biases that it adds to those products."""
    plain_products: list[str]
    """Names of weights of this module in other products."""


@torch.inference_mode()
def find_error(module: nn.Module, spec: RecurrentSpec, library: NativeLibrary | None) -> float:
    """Return the greatest error of a row over packed rows, relative to its norm.

    The errors of `FEW_ROWS` are divided by `MAX_RATIO_OF_FEW`.
    """
    with dequantized(module):
        module = copy.deepcopy(module).float()
    if is_lightning(module):
        widen_decays(module)
    num_tokens = sum(STEPS)
    scales = torch.tensor(TRIAL_SCALES).view(-1, 1, 1)
    shape = len(TRIAL_SCALES), num_tokens, spec.input_size
    rows = torch.randn(shape, generator=make_generator(1)) * scales
    with quiet_transformers():  # it warns that it uses its PyTorch functions
        expected = _computed(module, spec, rows)
    found = _computed_in_steps(module, spec, library, rows)
    if expected.shape != found.shape:
        return math.inf
    return _greatest_error(found, expected)


def _greatest_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    error = row_errors(found, expected)
    of_most = float(error.quantile(1.0 - FEW_ROWS, interpolation="higher"))
    greatest = max(of_most, float(error.max()) / MAX_RATIO_OF_FEW)
    return greatest if math.isfinite(greatest) else math.inf


@torch.inference_mode()
def observe(module: nn.Module, spec: RecurrentSpec, dtype: torch.dtype) -> Observed:
    """Run a module's own forward over single texts, with rows in the model's dtype.

    Returns the functions and weights that it uses.
    """
    seen: list[list[int]] = []
    for num_tokens in (2, 3):
        rows = torch.zeros(1, num_tokens, spec.input_size, dtype=dtype)
        with (
            quiet_transformers(),
            dequantized(module),
            RowwiseFunctions() as functions,
            ObservedProducts(module) as products,
        ):
            _computed(module, spec, rows)
        seen.append(functions.sizes)
    names = (products.left, products.right, products.added, products.others)
    return Observed(seen[0] != seen[1], *map(sorted, names))


def _computed_in_steps(
    module: nn.Module, spec: RecurrentSpec, library: NativeLibrary | None, rows: torch.Tensor
) -> torch.Tensor:
    num_texts, num_tokens, _ = rows.shape
    per_text = -(-num_tokens // _BLOCK_SIZE)
    pool = StatePool([spec], 1 + num_texts * per_text, _BLOCK_SIZE, torch.float32)
    layer = make_layer(module, spec, library)
    layer.attach(pool)
    install(module, layer)
    # Every third block of a text is new.
    tables = [
        array("i", (first + index // 3 for index in range(per_text)))
        for first in range(1, 1 + num_texts * per_text, per_text)
    ]

    def compute(packed: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        pool.begin_step(inputs)
        return _computed(module, spec, packed, inputs.position_ids)

    return compute_in_steps(rows, STEPS, tables, compute)


def _computed(
    module: nn.Module,
    spec: RecurrentSpec,
    rows: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return a module's output rows; several results are concatenated.

    The module receives the positions that it takes, by default those of whole texts; token ids and
    further rows that are derived from the rows; no cache; and None for all other required
    arguments.
    """
    _, _, *others = signature(type(module).forward).parameters.values()
    given: dict[str, Any] = {}
    for parameter in others:
        if parameter.name == "position_ids":
            given["position_ids"] = positions
            if positions is None:
                given["position_ids"] = torch.arange(rows.shape[1]).expand(len(rows), -1)
        elif (size := spec.other_sizes.get(parameter.name)) is not None:
            repeats = -(-size // rows.shape[-1])
            given[parameter.name] = rows.flip(-1).repeat(1, 1, repeats)[..., :size]
        elif parameter.name == "use_cache":
            given["use_cache"] = False
        elif parameter.name == "input_ids":
            given["input_ids"] = (rows[..., 0] > 0).long() + (rows[..., 1] > 0).long()
        elif (
            parameter.kind is parameter.POSITIONAL_OR_KEYWORD
            and parameter.default is Parameter.empty
        ):
            given[parameter.name] = None
    result: Any = module(rows, **given)
    if not isinstance(result, tuple):
        return cast(torch.Tensor, result)
    same = (one for one in result if isinstance(one, torch.Tensor) and one.dim() > 2)
    parts = [one.flatten(2) for one in same if one.shape[:2] == rows.shape[:2]]
    return torch.cat(parts, dim=-1)
