"""Score terms that are computed from rows: a query's biases by distance, and a bias of each key.

In Inkling, a module computes biases from a query's state, one for each distance to a key, and
gathers them for all pairs of queries and keys. Here it returns only the biases by distance, because
the packed row holds tokens of several texts, and the preceding keys are in the cache. In Doge, each
key's value determines its bias. The bias is stored in extra dimensions of the key, in which each
query has a constant, so that their product adds the bias. All other computation for these terms
remains transformers'.
"""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn

from worker_proc.errors import UnsupportedModel

KEY_BIAS_DIMS = 2
"""Dimensions of a key that hold its bias: the queries' constant is the sum of two numbers."""
_PLAIN = (None, "eager", "sdpa")
"""The attention implementations for which modules compute terms for all pairs themselves."""
_STATES = ("query_positions", "key_positions")
_ROWS = ("relative_distance", "position_ids")
"""The arguments after the first one, which holds queries' states, or rows from which a child
computes these states, too (Inkling-2 since transformers 5.24)."""
_NUM_DISTANCES = "rel_extent"
_KEY_BIAS_METHOD = "prepare_dynamic_mask"
_KEY_BIASES = "key_biases"
_KEEPS = "keep_window_size"
PRODUCT = "distance_product"
"""The attribute of a child that holds its packed product."""


class DistanceTerms:
    """The biases of queries by distance, computed by a child of an attention module."""

    def __init__(self, attention: nn.Module, child: nn.Module) -> None:
        self.attention, self.child = attention, child

    @property
    def num_distances(self) -> int:
        return int(getattr(self.child, _NUM_DISTANCES))

    @property
    def profiles(self) -> nn.Parameter:
        """The only parameter of the child itself: `[size of states, num_distances]`."""
        return _profiles(self.child)

    def cut(self, num_distances: int) -> None:
        """Keep only the first `num_distances` distances."""
        if num_distances < self.num_distances:
            [name] = self.child._parameters
            own = nn.Parameter(self.profiles[:, :num_distances], requires_grad=False)
            self.child._parameters[name] = own
            setattr(self.child, _NUM_DISTANCES, num_distances)


class KeyBiases:
    """Keeps the mask of the current forward of a module whose keys have biases."""

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        """Number of query heads for each KV head."""
        self.mask: object = None


def distance_terms_of(attention: nn.Module) -> DistanceTerms | None:
    """Return the child of an attention module that computes biases by distance, or None."""
    for child in attention.children():
        is_counting = isinstance(getattr(child, _NUM_DISTANCES, None), int)
        if is_counting and _arguments(child) in (_STATES, _ROWS):
            return DistanceTerms(attention, child)
    return None


def _arguments(child: nn.Module) -> tuple[str, ...]:
    return tuple(inspect.signature(type(child).forward).parameters)[2:]


def _profiles(child: nn.Module) -> nn.Parameter:
    [parameter] = child._parameters.values()
    assert parameter is not None
    return parameter


def key_biases_of(attention: nn.Module) -> KeyBiases | None:
    """Return the `KeyBiases` of a module whose keys have biases, or None."""
    found: KeyBiases | None = attention.__dict__.get(_KEY_BIASES)
    return found


def take_score_terms(model: nn.Module) -> int | None:
    """Make modules return terms of their rows alone whenever the model runs with paged attention.

    Returns the longest text for which this is exact, in tokens; None: any length. Raises
    UnsupportedModel if a mixture depends on the number of rows in a forward.
    """
    lengths = []
    for module in model.modules():
        terms = distance_terms_of(module)
        if terms is not None:
            child = terms.child
            child.__dict__.setdefault("config", module.config)  # names the implementation
            child.__dict__["forward"] = MethodType(_by_distance, child)
        if hasattr(type(module), _KEY_BIAS_METHOD):
            _check_mixture(model)
            lengths.append(int(getattr(module, _KEEPS)))
            module.__dict__[_KEY_BIASES] = KeyBiases(int(module.num_key_value_groups))  # type: ignore[arg-type]
            module.__dict__[_KEY_BIAS_METHOD] = MethodType(_of_keys, module)
    return min(lengths, default=None)


def _check_mixture(model: nn.Module) -> None:
    """Raise UnsupportedModel for a mixture that splits a forward's logits in two."""
    for name, module in model.named_modules():
        if hasattr(module, "router_gate") and hasattr(module, "num_keys"):
            raise UnsupportedModel(
                f"{name} ({type(module).__name__}) chooses the experts of a token by the number of"
                " tokens that a forward computes"
            )


def _by_distance(child: Any, states: torch.Tensor, *places: Any) -> torch.Tensor:
    """Replace a forward that computes biases of pairs; works in copies of the module, too.

    Returns each query's biases by distance, `[1, num_heads, T, num_distances]`.
    """
    if child.config._attn_implementation in _PLAIN:
        own: torch.Tensor = type(child).forward(child, states, *places)
        return own
    if _arguments(child) == _ROWS:
        _, positions = places
        projected = child.linear(states)
        projected = projected.view(*projected.shape[:-1], child.num_heads, -1)
        states = child.norm(projected, positions)
    product: Callable[[torch.Tensor], torch.Tensor] | None = child.__dict__.get(PRODUCT)
    if product is None:
        product = partial(torch.matmul, other=_profiles(child))
    return product(states).transpose(1, 2)


def _of_keys(
    module: Any,
    hidden_states: torch.Tensor,
    dt_states: torch.Tensor,
    keep_window_size: int = 0,
    attention_mask: object = None,
) -> torch.Tensor:
    """Replace a method that builds a mask with key biases; works in copies of the module, too.

    Returns the biases alone, `[1, num_kv_heads, 1, T]`, and keeps the mask.
    """
    if module.config._attn_implementation in _PLAIN:
        own: torch.Tensor = type(module).prepare_dynamic_mask(
            module, hidden_states, dt_states, keep_window_size, attention_mask
        )
        return own
    module.__dict__[_KEY_BIASES].mask = attention_mask
    return dt_states[:, :, None]


def with_key_biases(
    query: torch.Tensor, key: torch.Tensor, biases: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys, `[1, heads, T, dim]`, whose scores include the keys' biases.

    `biases` has a bias for each query head, `[1, num_heads, 1, T]`.
    """
    per_kv_head = query.shape[1] // key.shape[1]
    own = biases[:, ::per_kv_head, 0, :, None].to(key.dtype)
    key = torch.cat([key, own.expand(-1, -1, -1, KEY_BIAS_DIMS)], dim=-1)
    # The scores are multiplied by the scale. The dtype may not represent its inverse exactly, so
    # the remainder is in the second dimension.
    first = float(torch.tensor(1 / scale, dtype=query.dtype))
    constant = torch.tensor([first, 1 / scale - first], dtype=query.dtype, device=query.device)
    return torch.cat([query, constant.expand(*query.shape[:-1], -1)], dim=-1), key


def modules_with_terms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the names and modules of attention that has such terms."""
    for name, module in model.named_modules():
        if distance_terms_of(module) is not None or key_biases_of(module) is not None:
            yield name, module
