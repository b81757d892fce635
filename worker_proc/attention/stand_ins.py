"""Stand-ins for tensors, through which a model's own attention code is observed and computed.

Some models of transformers call no registered function: their own code multiplies queries by keys,
adds biases and a mask, and multiplies the softmax by values. Keys and values first pass through the
cache. The cache that such a model receives here returns stand-ins for them. The model's code runs
on with these: each operation on a stand-in is recorded, and the product of weights and values is
the result of an attention function that receives the recorded terms. An operation that is not known
here raises `UnsupportedModel`.
"""

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, NamedTuple, Self

import torch

from worker_proc.errors import UnsupportedModel

OWN_ATTENTION = "troika_own_attention"
"""The implementation name, for attention and masks, of models whose own code attends."""

Attend = Callable[["OwnCall"], torch.Tensor]
"""Computes a call over T rows; returns `[T, num_heads, value_head_dim]`."""


class Bias(NamedTuple):
    """A tensor, times a factor, that is added to the products of queries and keys."""

    tensor: torch.Tensor
    factor: float


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms that an attention module's code applies to products of queries and keys."""

    scale: float = 1.0
    biases: tuple[Bias, ...] = ()
    masks: tuple["OwnMask | torch.Tensor", ...] = ()
    """Stand-ins for masks, and bool tensors that are true for the keys that are seen."""

    def scaled(self, factor: float) -> "Terms":
        biases = tuple(Bias(bias.tensor, bias.factor * factor) for bias in self.biases)
        return replace(self, scale=self.scale * factor, biases=biases)


@dataclass(frozen=True, slots=True, eq=False)
class OwnCall:
    """An attention computation."""

    layer: int
    """The index under which the module stores keys and values in the cache."""
    query: torch.Tensor  # [T, num_heads, head_dim]
    key: torch.Tensor  # [T, num_kv_heads, head_dim]
    value: torch.Tensor  # [T, num_kv_heads, value_head_dim]
    terms: Terms


class OwnMask:
    """Stands in for the mask that transformers builds for the whole model."""

    ndim = 0
    """Falcon adds its biases both to a four-dimensional mask and to the scores."""

    def __init__(self, shape: tuple[int, int, int, int], content: object = None) -> None:
        self._shape = torch.Size(shape)
        self.content = content
        """What the mask shows, while it is being observed."""

    @classmethod
    def make(
        cls, batch_size: int, q_length: int, kv_length: int, content: object = None, **_: object
    ) -> Self:
        """Create a mask from the arguments that transformers passes."""
        return cls((batch_size, 1, q_length, kv_length), content)

    def size(self) -> torch.Size:
        return self._shape

    def to(self, *args: object, **kwargs: object) -> Self:
        return self


class Role(enum.StrEnum):
    """The tensor that a stand-in replaces."""

    KEYS = "keys"
    VALUES = "values"
    SCORES = "scores"
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True, eq=False)
class _Stored:
    """The keys and values of a layer's new rows, and the function that attends to them."""

    layer: int
    key: torch.Tensor  # [1, num_kv_heads, T, head_dim]
    value: torch.Tensor
    attend: Attend


class StandIn:
    """Replaces a tensor in a module's own attention; has a shape but no values."""

    def __init__(
        self,
        role: Role,
        stored: _Stored,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        query: torch.Tensor | None = None,
        terms: Terms = Terms(),
        is_transposed: bool = False,
    ) -> None:
        """Scores and weights also have `query`, `[..., T, head_dim]`, and `terms`."""
        self.role = role
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.device = torch.device("meta")
        """Tensors that a module creates on this device take no memory. Their values are unknown; if
        they matter, the proof against the module's own forward fails."""
        self._stored = stored
        self._query = query
        self._terms = terms
        self._is_transposed = is_transposed

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _unknown(name, self)

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        compute = _FUNCTIONS.get(func.__name__)
        if compute is None:
            values = (*args, *(kwargs or {}).values())
            raise _unknown(func.__name__, next(v for v in values if isinstance(v, StandIn)))
        return compute(*args, **(kwargs or {}))

    def _changed(self, **changes: Any) -> "StandIn":
        fields: dict[str, Any] = {
            "role": self.role,
            "shape": self.shape,
            "dtype": self.dtype,
            "query": self._query,
            "terms": self._terms,
            "is_transposed": self._is_transposed,
        } | changes
        return StandIn(stored=self._stored, **fields)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dim(self) -> int:
        return len(self.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def to(self, *args: Any, **kwargs: Any) -> "StandIn":
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.dtype)]
        return self._changed(dtype=given[0]) if given else self

    def float(self) -> "StandIn":
        return self._changed(dtype=torch.float32)

    def contiguous(self) -> "StandIn":
        return self

    def view(self, *shape: Any) -> "StandIn":
        """Return this stand-in with its heads in one or several dimensions."""
        wanted = shape[0] if isinstance(shape[0], tuple | list | torch.Size) else shape
        resolved = torch.empty(self.shape, device="meta").view(*wanted).shape
        if resolved[-2:] != self.shape[-2:]:
            raise _unknown("view", self)
        return self._changed(shape=resolved)

    reshape = view

    def transpose(self, one: int, other: int) -> "StandIn":
        """Return this stand-in with rows and dimensions exchanged."""
        last = {self.ndim - 1, self.ndim - 2}
        if self.role is not Role.KEYS or {one % self.ndim, other % self.ndim} != last:
            raise _unknown("transpose", self)
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        return self._changed(shape=shape, is_transposed=not self._is_transposed)

    def masked_fill(self, hidden: Any, value: object) -> "StandIn":
        mask = ~hidden if isinstance(hidden, torch.Tensor) else hidden
        return _masked(self, mask)

    def __add__(self, other: Any) -> "StandIn":
        return _added(self, other)

    __radd__ = __add__

    def __mul__(self, factor: Any) -> "StandIn":
        return _scaled(self, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> "StandIn":
        return _scaled(self, 1 / _number(divisor, self))

    def __matmul__(self, other: Any) -> Any:
        return _product(self, other)


def _unknown(name: str, stand_in: StandIn) -> UnsupportedModel:
    return UnsupportedModel(f"its own attention computes {name} of {stand_in.role}")


def _number(value: Any, stand_in: StandIn) -> float:
    if isinstance(value, torch.Tensor) and value.dim() == 0 and not value.is_meta:
        return float(value)
    if not isinstance(value, Real):
        raise _unknown("products with tensors", stand_in)
    return float(value)


def _scores(stand_in: object, name: str) -> StandIn:
    if not isinstance(stand_in, StandIn):
        raise UnsupportedModel(f"its own attention computes {name} with keys or values")
    if stand_in.role is not Role.SCORES:
        raise _unknown(name, stand_in)
    return stand_in


def _scaled(stand_in: StandIn, factor: Any) -> StandIn:
    scores = _scores(stand_in, "products")
    return scores._changed(terms=scores._terms.scaled(_number(factor, scores)))


def _added(stand_in: Any, other: Any, **kwargs: Any) -> StandIn:
    if not isinstance(stand_in, StandIn):
        stand_in, other = other, stand_in
    scores = _scores(stand_in, "sums")
    if other is None:
        return scores
    if isinstance(other, OwnMask):
        return _masked(scores, other)
    if kwargs or not isinstance(other, torch.Tensor):
        raise _unknown("sums", scores)
    terms = scores._terms
    return scores._changed(terms=replace(terms, biases=(*terms.biases, Bias(other, 1.0))))


def _masked(stand_in: StandIn, mask: Any) -> StandIn:
    scores = _scores(stand_in, "masks")
    terms = scores._terms
    return scores._changed(terms=replace(terms, masks=(*terms.masks, mask)))


def _where(mask: Any, stand_in: Any, value: Any) -> StandIn:
    return _masked(stand_in, mask)


def _bounded(stand_in: Any, minimum: Any) -> StandIn:
    """Return the scores unchanged: they are already above the least number of their type."""
    return _scores(stand_in, "bounds")


def _product(one: Any, other: Any) -> Any:
    if not isinstance(other, StandIn):
        raise _unknown("products with tensors", one)
    if other.role is Role.KEYS and other._is_transposed and isinstance(one, torch.Tensor):
        shape = (*one.shape[:-1], other.shape[-1])
        return StandIn(Role.SCORES, other._stored, shape, one.dtype, query=one)
    if other.role is Role.VALUES and isinstance(one, StandIn) and one.role is Role.WEIGHTS:
        return _attended(one, other)
    raise _unknown("products", other)


def _attended(weights: StandIn, values: StandIn) -> torch.Tensor:
    stored, query = weights._stored, weights._query
    if stored is not values._stored or query is None:
        raise UnsupportedModel("its own attention weights the values of another layer")
    num_rows, head_dim = query.shape[-2:]
    call = OwnCall(
        stored.layer,
        query.reshape(-1, num_rows, head_dim).transpose(0, 1),
        stored.key[0].transpose(0, 1),
        stored.value[0].transpose(0, 1),
        weights._terms,
    )
    out = stored.attend(call).transpose(0, 1).to(values.dtype)
    return out.reshape(*weights.shape[:-1], out.shape[-1])


def _biased_product(
    input: torch.Tensor, batch1: Any, batch2: Any, *, beta: float = 1.0, alpha: float = 1.0
) -> StandIn:
    scores = _scaled(_product(batch1, batch2), alpha)
    terms = scores._terms
    return scores._changed(terms=replace(terms, biases=(*terms.biases, Bias(input, beta))))


def _softmax(input: Any, dim: int | None = None, dtype: Any = None, **_: Any) -> StandIn:
    scores = _scores(input, "softmax")
    if dim not in {-1, scores.ndim - 1}:
        raise _unknown(f"softmax over dimension {dim}", scores)
    return scores._changed(role=Role.WEIGHTS, dtype=dtype or scores.dtype)


def _without_dropout(input: StandIn, *args: Any, training: bool = False, **kwargs: Any) -> StandIn:
    return input


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **dict.fromkeys(("matmul", "bmm", "__matmul__", "__rmatmul__"), _product),
    "baddbmm": _biased_product,
    **dict.fromkeys(("add", "__add__", "__radd__"), _added),
    "where": _where,
    **dict.fromkeys(("max", "maximum"), _bounded),
    "softmax": _softmax,
    "dropout": _without_dropout,
}
"""The implementations of torch's functions for stand-ins, by name."""


class OwnCache:
    """Replaces the cache: a module that stores keys and values receives stand-ins for them."""

    is_compileable = False

    def __init__(self, attend: Attend, num_past: int = 0) -> None:
        """`num_past`: the number of tokens that count as already stored."""
        self._attend = attend
        self._num_past = num_past

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[StandIn, StandIn]:
        """Store keys and values, `[1, num_kv_heads, T, dim]`, of a layer."""
        stored = _Stored(layer_idx, key, value, self._attend)
        shapes = (
            (*rows.shape[:-2], self._num_past + rows.shape[-2], rows.shape[-1])
            for rows in (key, value)
        )
        key_shape, value_shape = shapes
        return (
            StandIn(Role.KEYS, stored, key_shape, key.dtype),
            StandIn(Role.VALUES, stored, value_shape, value.dtype),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._num_past

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self._num_past

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys and the position of the first one."""
        return self._num_past + query_length, 0
