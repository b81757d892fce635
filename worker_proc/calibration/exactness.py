"""Checks at load whether a model's logits have the same bits in every schedule.

A request that lost its worker is computed again from its tokens, in other chunks and alongside
other requests. Its next token is certain to be the same only if a row's result depends on its own
text alone. Known properties of the backend are checked first. Then the model's own modules are
tried, with the threads and shapes with which they will run.
"""

from contextlib import nullcontext
from typing import NamedTuple

import torch

from worker_proc.attention.interface import AttentionBackend
from worker_proc.attention.no_attention import NoAttention
from worker_proc.calibration.plain_products import plain_products
from worker_proc.calibration.row_trials import ROW_COUNTS, repeats_rows
from worker_proc.calibration.same_bits import have_same_bits
from worker_proc.calibration.self_check import TEXT_LENGTHS, check_texts, compute_whole
from worker_proc.calibration.token_parts import distinct_parts, recorded_calls
from worker_proc.calibration.token_products import TokenProducts
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.modules.packed_linear import PACKED_DTYPES, PackedLinear
from worker_proc.recurrent.rowwise import RowwiseFunctions

MAX_PRODUCTS = 2**28
"""The maximum number of multiplications in a trial of a module, which take some milliseconds."""


class Exactness(NamedTuple):
    """Whether a request that is computed again gets the same tokens; if not, the reason."""

    holds: bool
    reason: str


def check_exactness(
    loaded: LoadedModel, backend: AttentionBackend, layout: KVLayout, stepwise: list[torch.Tensor]
) -> Exactness:
    """Check a model with its cache, given the result of `check_forward`; overwrites blocks."""
    reason = _obstacle(loaded, backend) or _difference(loaded, backend, layout, stepwise)
    return Exactness(not reason, reason)


def _obstacle(loaded: LoadedModel, backend: AttentionBackend) -> str:
    """Return the reason why a part is known to depend on the batch; empty: there is none."""
    on_cpu = loaded.device.type == "cpu"
    if not on_cpu and backend.depends_on_batch:
        device = loaded.device.type
        return f"matrix products on {device} may depend on the batch (see --batch-invariant)"
    if on_cpu and loaded.dtype not in PACKED_DTYPES:
        dtype = str(loaded.dtype).removeprefix("torch.")
        return f"plain matrix products, which depend on the batch, for dtype {dtype}"
    if plain := next(plain_products(loaded.model), None):
        return f"plain matrix products, which depend on the batch, in {plain}"
    if not backend.depends_on_batch:
        return ""
    if isinstance(backend, NoAttention):
        return "the native kernels were not compiled at the load"
    return (
        "plain attention, which depends on the batch: the native kernel was not compiled when"
        " the model was loaded, or does not cover its heads"
    )


def _difference(
    loaded: LoadedModel, backend: AttentionBackend, layout: KVLayout, stepwise: list[torch.Tensor]
) -> str:
    """Compute the self check's texts at once, and each module with other numbers of rows."""
    products = TokenProducts(sum(TEXT_LENGTHS))
    with recorded_calls(loaded.model) as calls, products:
        whole = compute_whole(loaded, backend, layout, check_texts(loaded.vocab_size))
    for (name, module, is_entered), args in distinct_parts(loaded.model, calls):
        weights = sum(p.weight.numel() for p in module.modules() if isinstance(p, PackedLinear))
        counts = [count for count in ROW_COUNTS if count * weights <= MAX_PRODUCTS]
        with RowwiseFunctions() if is_entered else nullcontext():
            for num_rows in counts:
                if not repeats_rows(module, args, num_rows):
                    kind = type(module).__name__
                    return f"{name} ({kind}) gives rows other bits among {num_rows}"
    if reason := products.difference(ROW_COUNTS):
        return reason
    if not all(map(have_same_bits, whole, stepwise)):
        return "a text's logits have other bits computed at once than computed step by step"
    return ""
