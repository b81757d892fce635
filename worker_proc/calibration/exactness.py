"""Checks at load whether a model's logits have the same bits in every schedule.

A request that lost its worker is computed again from its tokens, in other chunks and alongside
other requests. Its next token is certain to be the same only if a row's result depends on its own
text alone. Known properties of the backend are checked first. Then the model's own modules are
tried, with the threads and shapes with which they will run.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call

from worker_proc.attention.interface import AttentionBackend
from worker_proc.attention.no_attention import NoAttention
from worker_proc.attention.within_tokens import attends_in_tokens
from worker_proc.calibration.self_check import (
    TEXT_LENGTHS,
    check_texts,
    compute_whole,
    have_same_bits,
)
from worker_proc.calibration.token_products import TokenProducts
from worker_proc.kv.kv_groups import KVLayout
from worker_proc.loading.deferred_module import make_generator
from worker_proc.loading.loader import LoadedModel
from worker_proc.modules.left_factors import ObservedProducts
from worker_proc.modules.packed_linear import PACKED_DTYPES, PackedLinear
from worker_proc.modules.packed_matrix import PackedMatrix
from worker_proc.modules.rowwise_linear import is_rowwise
from worker_proc.modules.trial_errors import TRIAL_FAILURES
from worker_proc.recurrent.layers import PackedLayer
from worker_proc.recurrent.rowwise import RowwiseFunctions, computes_rowwise

Calls = dict[nn.Module, tuple[torch.Tensor, ...]]
ROW_COUNTS = (1, 3, 17, 65)
"""The numbers of rows with which modules are tried."""
NUM_TRIAL_ROWS = 5
MAX_FACTORS = 2**17
"""The maximum number of elementwise factors of a module: those of 512 heads of 256 dimensions."""
MAX_PRODUCTS = 2**28
"""The maximum number of multiplications in a trial of a module, which take some milliseconds."""
_POSITIONS = "position_ids"
_TRIAL_DISTANCE = 1000
"""The distance between the positions of two rows in a trial."""


class _Part(NamedTuple):
    """A part of a model without attention."""

    name: str
    module: nn.Module
    is_entered: bool
    """True if an enclosing module computes its elementwise functions by `rowwise`."""


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
    if plain := next(_plain_products(loaded.model), None):
        return f"plain matrix products, which depend on the batch, in {plain}"
    if not backend.depends_on_batch:
        return ""
    if isinstance(backend, NoAttention):
        return "the native kernels were not compiled at the load"
    return (
        "plain attention, which depends on the batch: the native kernel was not compiled when"
        " the model was loaded, or does not cover its heads"
    )


def _plain_products(model: nn.Module) -> Iterator[str]:
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
        if is_rowwise(module) or _multiplies_by_elements(module) or attends_in_tokens(module):
            continue
        layer: PackedLayer | None = module.__dict__.get("recurrent_layer")
        if any(
            _is_matrix(parameter) and not parameter.is_meta
            for own_name, parameter in module.named_parameters(recurse=False)
            if layer is None or own_name in layer.plain_products
        ):
            yield f"{name} ({type(module).__name__})"


@torch.inference_mode()
def _multiplies_by_elements(module: nn.Module) -> bool:
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
        return all(_repeats_rows(module, args, count) for count in ROW_COUNTS)
    except TRIAL_FAILURES:
        return False  # it takes other arguments


def _has_factors_of(module: nn.Module, args: tuple[torch.Tensor, ...]) -> bool:
    """Return whether a module multiplies each row by elements, and rows are the first dimension.

    Norms of heads in Chameleon take tokens, heads and values, without a batch. The second dimension
    is then one of the factors. `_multiplies_by_elements` tries them with various numbers of rows.
    """
    shapes = {tuple(weight.shape) for weight in module.parameters()}
    return shapes == {tuple(args[0].shape[1:])} and _multiplies_by_elements(module)


def _is_matrix(parameter: nn.Parameter) -> bool:
    return sum(size > 1 for size in parameter.shape) > 1


def _difference(
    loaded: LoadedModel, backend: AttentionBackend, layout: KVLayout, stepwise: list[torch.Tensor]
) -> str:
    """Compute the self check's texts at once, and each module with other numbers of rows."""
    products = TokenProducts(sum(TEXT_LENGTHS))
    with _recorded_calls(loaded.model) as calls, products:
        whole = compute_whole(loaded, backend, layout, check_texts(loaded.vocab_size))
    for (name, module, is_entered), args in _distinct(loaded.model, calls):
        weights = sum(p.weight.numel() for p in module.modules() if isinstance(p, PackedLinear))
        counts = [count for count in ROW_COUNTS if count * weights <= MAX_PRODUCTS]
        with RowwiseFunctions() if is_entered else nullcontext():
            for num_rows in counts:
                if not _repeats_rows(module, args, num_rows):
                    kind = type(module).__name__
                    return f"{name} ({kind}) gives rows other bits among {num_rows}"
    if reason := products.difference(ROW_COUNTS):
        return reason
    if not all(map(have_same_bits, whole, stepwise)):
        return "a text's logits have other bits computed at once than computed step by step"
    return ""


@contextmanager
def _recorded_calls(model: nn.Module) -> Iterator[Calls]:
    """Record the arguments of each part of a model that does not mix tokens."""
    calls: Calls = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A part with other arguments is tried only as a part of the whole forward.
        has_streams = _has_packed_matrices(module) or attends_in_tokens(module)
        dims = (3, 4) if has_streams else (3,)
        if kwargs or not all(isinstance(v, torch.Tensor) and v.dim() in dims for v in args):
            return
        if len({value.shape[1] for value in args}) == 1 and not _has_factors_of(module, args):
            calls[module] = args

    parts = _parts_without_attention("", model)
    handles = [part.module.register_forward_pre_hook(record, with_kwargs=True) for part in parts]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _distinct(model: nn.Module, calls: Calls) -> Iterator[tuple[_Part, tuple[torch.Tensor, ...]]]:
    """Yield one part of each type, shape and input shape, with its arguments."""
    seen = set()
    for part in _parts_without_attention("", model):
        if (args := calls.get(part.module)) is not None:
            shapes = (tuple(t.shape) for t in (*part.module.parameters(), *args))
            kind = type(part.module), part.is_entered, *shapes
            if kind not in seen:
                seen.add(kind)
                yield part, args


def _parts_without_attention(
    name: str, module: nn.Module, is_entered: bool = False
) -> Iterator[_Part]:
    if not any(_mixes_tokens(part) for part in module.modules()):
        yield _Part(name, module, is_entered)
        return
    is_entered |= computes_rowwise(module)
    for child_name, child in module.named_children():
        # Embeddings compute nothing; convolutions are parts of recurrent layers, and take columns.
        if not isinstance(child, nn.Embedding | nn.Conv1d):
            path = f"{name}.{child_name}".lstrip(".")
            yield from _parts_without_attention(path, child, is_entered)


def _has_packed_matrices(module: nn.Module) -> bool:
    """Return whether a module itself multiplies by packed matrices; its rows may have streams."""
    return any(isinstance(value, PackedMatrix) for value in module.__dict__.values())


def _mixes_tokens(module: nn.Module) -> bool:
    return "paged_layer" in module.__dict__ or "recurrent_layer" in module.__dict__


@torch.inference_mode()
def _repeats_rows(module: nn.Module, args: tuple[torch.Tensor, ...], num_rows: int) -> bool:
    """Return whether repeated rows have the same bits as single ones."""
    once = args[0].shape[1]
    index = torch.arange(num_rows, device=args[0].device) % once
    want, got = module(*args), module(*(value.index_select(1, index) for value in args))
    wanted, found = (out if isinstance(out, tuple) else (out,) for out in (want, got))
    return all(
        _repeats_result(one, other, index, once) for one, other in zip(wanted, found, strict=True)
    )


def _repeats_result(one: torch.Tensor, other: torch.Tensor, index: torch.Tensor, once: int) -> bool:
    """Return whether a result for repeated rows repeats the result for single ones.

    The row dimension is the one whose size follows the number of rows. It is usually the second of
    three; the results of a router have no batch dimension before it, and some results have heads
    after it.
    """
    sizes = zip(one.shape, other.shape, strict=False)
    dim = next((dim for dim, pair in enumerate(sizes) if pair == (once, len(index))), None)
    repeated = one if dim is None else one.index_select(dim, index)
    return repeated.shape == other.shape and have_same_bits(repeated, other)
