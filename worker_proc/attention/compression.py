"""Attention with compressors, which summarize several tokens in one entry (DeepSeek-V4).

A compressor's own forward passes the values and gates of its rows to a cache, and receives those
whose groups of tokens are complete. The cache passed to it here keeps them for the attention that
follows, and returns none: the native kernel computes the entries, selects those that an indexer
scores highest, and attends (native/attention/compressed_attention.h). Projections, norms,
rotations and everything else remain transformers'.
"""

import inspect
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from worker_proc.errors import UnsupportedModel
from worker_proc.kv.kv_groups import CompressedSpec
from worker_proc.recurrent.cache_argument import CACHE

MAX_COMPRESSED_HEADS = 256  # limit in compressed_attention.h
_PLAIN = (None, "eager", "sdpa")
"""The attention implementations with which modules compute entries themselves."""
_STORE = "store_compression_weights"
"""The method of a cache that compressors call."""
_ATTRIBUTE = "compression"
_COMPRESSOR = "compressor"
_INDEXER = "indexer"
"""Names of modules, under which they store their results."""


class Contribution(NamedTuple):
    """A row's contribution to entries; both tensors are `[T, num_series * dim]`."""

    values: torch.Tensor
    gates: torch.Tensor


class IndexQueries(NamedTuple):
    """The queries and head weights by which an indexer's rows choose entries."""

    queries: torch.Tensor  # [T, num_index_heads, index_dim]
    weights: torch.Tensor  # float32 [T, num_index_heads]


class Parameters(NamedTuple):
    """Parameters with which the kernel computes entries from contributions, in float32."""

    biases: torch.Tensor  # [ratio, num_series * dim]
    factors: torch.Tensor  # [dim]
    epsilon: float


class Compression:
    """The compressor of an attention module; acts as the module's cache while rows are computed."""

    def __init__(self, module: nn.Module) -> None:
        self._compressor = cast(Any, module).compressor
        self._is_plain = True
        self.contributions: dict[str, Contribution] = {}
        self.index: IndexQueries | None = None
        self.parameters: dict[str, Parameters] = {}
        """The parameters by module name; empty until `take_parameters` is called."""

    @property
    def modules(self) -> Mapping[str, nn.Module]:
        """The compressor and, if it has one, its indexer's own compressor, by name."""
        found = {_COMPRESSOR: self._compressor}
        indexer = getattr(self._compressor, _INDEXER, None)
        return found if indexer is None else found | {_INDEXER: indexer}

    @property
    def index_scale(self) -> float:
        """The factor by which an indexer's scores are multiplied."""
        return float(self._compressor.indexer.scorer.softmax_scale)

    def spec(self, window: int, head_dim: int) -> CompressedSpec:
        """Return the layout of the module's stored data; call it after rows have been computed."""
        compressor: Any = self._compressor
        num_series = self.contributions[_COMPRESSOR].values.shape[1] // head_dim
        index_dim = num_index_heads = num_chosen = 0
        if self.index is not None:
            _, num_index_heads, index_dim = self.index.queries.shape
            num_chosen = int(compressor.indexer.index_topk)
        spec = CompressedSpec(
            window,
            int(compressor.compress_rate),
            num_series,
            index_dim,
            num_index_heads,
            num_chosen,
        )
        dims = {_COMPRESSOR: head_dim} | ({_INDEXER: index_dim} if index_dim else {})
        shapes_fit = dims.keys() == self.contributions.keys() and all(
            part.shape[1] == num_series * dims[name]
            for name, contribution in self.contributions.items()
            for part in contribution
        )
        if num_series not in (1, 2) or not shapes_fit or spec.ratio < 1:
            raise UnsupportedModel(f"{type(compressor).__name__} compresses in another way")
        return spec

    def take_parameters(self) -> None:
        """Move the parameters that only the kernel uses out of the modules."""
        for name, module in self.modules.items():
            norm = cast(nn.Module, module.kv_norm)
            biases = cast(nn.Parameter, module._parameters.pop("position_bias")).detach()
            module.__dict__["position_bias"] = biases  # still read by its own forward
            self.parameters[name] = Parameters(
                biases.float().contiguous(),
                cast(torch.Tensor, norm.weight).detach().float().contiguous(),
                cast(float, norm.variance_epsilon),
            )

    def used_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that the kernel uses."""
        for module in self.modules.values():
            yield cast(nn.Parameter, module.position_bias)
            yield from cast(nn.Module, module.kv_norm).parameters()

    def angles(self, rows: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return cosines and sines of entries, each `[n, rope_dim / 2]`, given their positions."""
        compressor: Any = self._compressor
        found = compressor.rotary_emb(
            rows, position_ids=positions.unsqueeze(0), layer_type=compressor.rope_layer_type
        )
        return tuple(part[0].float().contiguous() for part in found)

    # The modules call the following methods.

    @property
    def layers(self) -> "Compression":
        return self

    def __getitem__(self, layer: int) -> "Compression":
        return self

    def update(
        self, key: torch.Tensor, value: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return only the step's own rows; earlier rows are in the paged cache."""
        return key, value

    def store_compression_weights(
        self, name: str, values: torch.Tensor, gates: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Keep the rows' contributions and return none of them."""
        self.contributions[name] = Contribution(values[0], gates[0])
        return values[:, :0], gates[:, :0], 0

    @staticmethod
    def update_compressor_states(name: str, entries: torch.Tensor) -> torch.Tensor:
        """Return no entries."""
        return entries

    def begin(self, *, is_plain: bool) -> None:
        self._is_plain = is_plain
        self.clear()

    def clear(self) -> None:
        """Drop the contributions of the last forward; those of all layers would take gigabytes."""
        self.contributions, self.index = {}, None

    def score(
        self, scorer: Any, queries: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Replace an indexer's scores, by which its own forward selects entries.

        Paged forwards have no entries to score yet.
        """
        if self._is_plain:
            return _ranked(type(scorer).forward(scorer, queries, keys, hidden))
        weights = scorer.weights_proj(hidden).float() * scorer.weights_scaling
        self.index = IndexQueries(queries[0], weights[0])
        return queries.new_empty(*queries.shape[:2], 0)


def _ranked(scores: torch.Tensor) -> torch.Tensor:
    """Return scores in the same order, in which the earlier one of two equal ones is higher.

    The kernel has this order; that of equal values in `topk` is undefined.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(0, -scores.shape[-1], -1, device=scores.device, dtype=scores.dtype)
    return torch.empty_like(scores).scatter_(-1, order, ranks.expand_as(scores))


def compression_of(module: nn.Module) -> Compression | None:
    """Return the compression installed on an attention module, or None."""
    found: Compression | None = module.__dict__.get(_ATTRIBUTE)
    return found


def take_compressors(model: nn.Module) -> list[Compression]:
    """Make attention modules with compressors store their contributions in paged forwards."""
    found = []
    for module in model.modules():
        compressor = getattr(module, _COMPRESSOR, None)
        if not isinstance(compressor, nn.Module) or not _stores(compressor):
            continue
        compression = Compression(module)
        module.__dict__[_ATTRIBUTE] = compression
        module.register_forward_pre_hook(_give, with_kwargs=True)
        indexer: Any = getattr(compressor, _INDEXER, None)
        if indexer is not None:
            indexer.scorer.__dict__[_ATTRIBUTE] = compression
            indexer.scorer.__dict__["forward"] = MethodType(_score, indexer.scorer)
        found.append(compression)
    return found


def _stores(compressor: nn.Module) -> bool:
    """Return whether a module's own forward stores contributions in a cache."""
    code = getattr(inspect.unwrap(type(compressor).forward), "__code__", None)
    return code is not None and _STORE in code.co_names


def _give(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass a module its compression as the cache; a copied module passes its own."""
    compression: Compression = module.__dict__[_ATTRIBUTE]
    is_plain = cast(Any, module).config._attn_implementation in _PLAIN
    compression.begin(is_plain=is_plain)
    return args, kwargs if is_plain else kwargs | {CACHE: compression}


def _score(scorer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Replace a scorer's forward; works in copies of the scorer, too."""
    compression: Compression = scorer.__dict__[_ATTRIBUTE]
    return compression.score(scorer, *args, **kwargs)
