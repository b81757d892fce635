"""Finds modules whose products of matrices may depend on the batch.

Packed matrices and embeddings do not. Other matrices of a module count, unless the module
multiplies its rows elementwise by them.
"""

import inspect
from collections.abc import Iterator

import torch
from torch import nn
from torch.func import functional_call

from worker_proc.attention.within_tokens import attends_in_tokens
from worker_proc.calibration.row_trials import ROW_COUNTS, repeats_rows
from worker_proc.loading.deferred_module import make_generator
from worker_proc.modules.left_factors import ObservedProducts
from worker_proc.modules.packed_linear import PackedLinear
from worker_proc.modules.rowwise_linear import is_rowwise
from worker_proc.modules.trial_errors import TRIAL_FAILURES
from worker_proc.recurrent.layers import PackedLayer

NUM_TRIAL_ROWS = 5
MAX_FACTORS = 2**17
"""The maximum number of elementwise factors of a module: those of 512 heads of 256 dimensions."""
_POSITIONS = "position_ids"
_TRIAL_DISTANCE = 1000
"""The distance between the positions of two rows in a trial."""


def plain_products(model: nn.Module) -> Iterator[str]:
    """Yield modules that use their own matrices, neither packed nor embeddings.

    Convolutions of recurrent layers are computed row by row. Other matrices of such a layer only
    count if they take part in products; a decay for each channel and key, for example, does not.
    """
    convolutions = {
        child
        for module in model.modules()
        if "recurrent_layer" in module.__dict__
        for child in module.children()
        if isinstance(child, nn.Conv1d)
    }
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear | nn.Embedding) or module in convolutions:
            continue
        # Modules with attention within a token are tried with various numbers of rows.
        if is_rowwise(module) or multiplies_by_elements(module) or attends_in_tokens(module):
            continue
        layer: PackedLayer | None = module.__dict__.get("recurrent_layer")
        if any(
            _is_matrix(parameter) and not parameter.is_meta
            for own_name, parameter in module.named_parameters(recurse=False)
            if layer is None or own_name in layer.plain_products
        ):
            yield f"{name} ({type(module).__name__})"


@torch.inference_mode()
def multiplies_by_elements(module: nn.Module) -> bool:
    """Return whether a module multiplies its rows elementwise by its own weights.

    A norm of heads with separate factors for each head is an example; it may take positions, too.
    The module's children must have no weights, and its results for a row must have the same bits
    among every number of rows.
    """
    weights = [weight for weight in module.parameters() if not weight.is_meta]
    if len({weight.shape for weight in weights}) != 1:
        return False
    if any(next(child.parameters(), None) is not None for child in module.children()):
        return False
    if weights[0].numel() > MAX_FACTORS:
        return False
    rows = torch.randn(1, NUM_TRIAL_ROWS, *weights[0].shape, generator=make_generator(1))
    rows = rows.to(weights[0].dtype)
    args: tuple[torch.Tensor, ...] = (rows,)
    if _POSITIONS in inspect.signature(type(module).forward).parameters:
        args = (rows, torch.arange(NUM_TRIAL_ROWS).unsqueeze(0) * _TRIAL_DISTANCE)
    try:
        with ObservedProducts(module) as products:
            out = module(*args)
        used = products.left | products.right | products.added | products.others
        if used or not isinstance(out, torch.Tensor) or out.shape != rows.shape:
            return False
        more = {name: weight + 1 for name, weight in module.named_parameters()}
        if torch.equal(functional_call(module, more, args), out):
            return False  # it multiplies other rows by them
        return all(repeats_rows(module, args, count) for count in ROW_COUNTS)
    except TRIAL_FAILURES:
        return False  # it takes other arguments


def _is_matrix(parameter: nn.Parameter) -> bool:
    return sum(size > 1 for size in parameter.shape) > 1
