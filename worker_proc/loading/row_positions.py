"""Provides packed rows' positions to attention modules that derive them from a cache.

Llama-4's layers without rotation multiply queries by a factor that grows with the position. They
compute the position as the row number plus the length of the cache. A packed row holds tokens of
several texts, so each such layer receives a stand-in for the cache, with a separate length for each
row: the difference between the row's position and its number. The layer's own code computes the
factor.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from worker_proc.attention.interface import IMPLEMENTATION, set_implementation
from worker_proc.attention.probed_layer import ProbedLayer
from worker_proc.errors import UnsupportedModel
from worker_proc.loading.deferred_module import make_generator
from worker_proc.recurrent.cache_argument import CACHE

_CAPTURE = "troika_capture"
_NUM_ROWS = 5


class PackedPositions:
    """Stands in for the cache of a forward whose rows have separate positions."""

    def __init__(self, position_ids: torch.Tensor) -> None:
        """`position_ids` are `[1, T]`."""
        rows = position_ids[0]
        self._missing = rows - torch.arange(len(rows), device=rows.device)

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Return the difference between each row's position and its number, `[T]`."""
        return self._missing

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys, which are the row's own, and the position of the first one."""
        return query_length, 0

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None: modules with states keep their columns elsewhere."""

    @staticmethod
    def update_conv_state(columns: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        """Return columns unchanged."""
        return columns

    @staticmethod
    def update(
        key: torch.Tensor, value: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys and values: the attention function accesses the KV cache."""
        return key, value


class PastTokens(PackedPositions):
    """Stands in for a cache with a number of tokens, to which no row attends."""

    def __init__(self, num_tokens: int) -> None:
        self._missing = torch.tensor(num_tokens)
        self._num_tokens = num_tokens

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys, and the position of the first one; earlier keys are hidden."""
        return query_length, self._num_tokens


def counts_from_cache(module: nn.Module) -> bool:
    """Return whether a module's own code asks a cache for the position of its first row."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "get_query_offset" in code.co_names


def give_positions_of_rows(model: nn.Module, layers: Sequence[ProbedLayer]) -> None:
    """Provide packed rows' positions to attention modules that ask a cache for them.

    Only the whole model receives positions as an argument.
    """
    names = dict.fromkeys(layer.module_name for layer in layers)
    modules = [one for one in map(model.get_submodule, names) if counts_from_cache(one)]
    if not modules:
        return
    given: list[torch.Tensor | None] = [None]

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given[0] = kwargs.get("position_ids")

    def give(
        module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        is_served = module.config._attn_implementation == IMPLEMENTATION
        if not is_served or given[0] is None or kwargs.get(CACHE) is not None:
            return None
        return args, kwargs | {CACHE: PackedPositions(given[0])}

    model.register_forward_pre_hook(note, with_kwargs=True)
    for module in modules:
        module.register_forward_pre_hook(give, with_kwargs=True)


def counts_rows(module: nn.Module) -> bool:
    """Return whether a module multiplies queries by a factor that depends on the row number."""
    has_factor = bool(getattr(module, "attn_temperature_tuning", False))
    return has_factor and not getattr(module, "use_rope", False)


def give_positions(model: nn.Module, layers: Sequence[ProbedLayer], model_len: int) -> None:
    """Make attention modules that count rows use the positions of packed rows.

    Raises UnsupportedModel if a module then computes other queries than with a cache.
    """
    names = [layer.module_name for layer in layers]
    counting = [name for name in names if counts_rows(model.get_submodule(name))]
    if not counting:
        return
    with _captured_queries(model) as queries:
        for name in counting:
            if not _takes_positions(model.get_submodule(name), queries, model_len):
                raise UnsupportedModel(f"{name} counts rows in place of positions")
    for name in counting:
        parent = model.get_submodule(name.rpartition(".")[0])
        parent.register_forward_pre_hook(_replace_cache, with_kwargs=True)


def _replace_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if kwargs.get(CACHE) is None:
        kwargs = kwargs | {CACHE: PackedPositions(kwargs["position_ids"])}
    return args, kwargs


@contextmanager
def _captured_queries(model: nn.Module) -> Iterator[list[torch.Tensor]]:
    """Replace the attention function by one that records queries and returns zeros."""
    queries: list[torch.Tensor] = []

    def capture(
        module: nn.Module, query: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, None]:
        queries.append(query)
        return torch.zeros_like(query).transpose(1, 2), None

    ALL_ATTENTION_FUNCTIONS.register(_CAPTURE, capture)
    set_implementation(model, _CAPTURE)
    try:
        yield queries
    finally:
        set_implementation(model, IMPLEMENTATION)
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(_CAPTURE, None)


@torch.inference_mode()
def _takes_positions(module: Any, queries: list[torch.Tensor], model_len: int) -> bool:
    """Return whether packed rows have the same queries as with the corresponding cached tokens."""
    weight = module.q_proj.weight
    rows = torch.randn(1, _NUM_ROWS, weight.shape[1], generator=make_generator(1))
    rows = rows.to(weight)
    positions = [model_len - 1, 0, 1, model_len // 2, model_len // 3]

    def query_of(hidden: torch.Tensor, cache: PackedPositions) -> torch.Tensor:
        queries.clear()
        module(
            hidden_states=hidden,
            position_embeddings=None,
            attention_mask=None,
            **{CACHE: cache},
        )
        return queries.pop()

    packed = torch.tensor([positions], device=weight.device)
    found = query_of(rows, PackedPositions(packed))
    for row, position in enumerate(positions):
        # All rows at once, since products of a single row may be rounded differently.
        expected = query_of(rows, PastTokens(position - row))
        if not torch.equal(found[:, :, row], expected[:, :, row]):
            return False
    return True
