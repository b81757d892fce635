"""Connects transformers' attention modules to the paged KV cache.

`IMPLEMENTATION` is the name under which the function is registered. No mask is registered under it,
so transformers builds none: the positions that a token attends to follow from the step's inputs.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from worker_proc.attention.compression import Compression
from worker_proc.attention.score_terms import with_key_biases
from worker_proc.attention.stand_ins import OWN_ATTENTION
from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_groups import LayerSpec, Place
from worker_proc.kv.kv_tensors import KVTensors, Shapes

IMPLEMENTATION = "troika_paged"


class Rows(NamedTuple):
    """Queries, keys and values of T packed tokens in one layer."""

    query: torch.Tensor  # [T, num_heads, head_dim]
    key: torch.Tensor  # [T, num_kv_heads, head_dim]
    value: torch.Tensor  # [T, num_kv_heads, value_head_dim]


class Scoring(NamedTuple):
    """Parameters of the score of a query and a key."""

    scale: float
    softcap: float | None  # bound that scores approach by tanh
    biases: torch.Tensor | None = None
    """`[T, num_heads, distances]`: what each query adds to the scores of the keys before it, by
    their distance, its own key first. Nothing is added to those that are further away."""
    sinks: torch.Tensor | None = None
    """float32 `[T, num_heads]`: sinks of each query, in place of those of the layer."""


class AttentionBackend(Protocol):
    """One way to compute attention over the pool; holds the metadata of the current step."""

    name: str
    """For people."""
    depends_on_batch: bool
    """Whether a row's result may depend on the rows alongside it, or on the cut of its text."""

    def pool_shapes(self, spec: LayerSpec, num_blocks: int) -> Shapes:
        """Return the shapes of a layer's pools of keys and, unless it is latent, of values."""

    def begin_step(self, inputs: StepInputs) -> None:
        """Build the indices that the layers share; called once before a step's forward."""

    def attend(self, layer: "PagedLayer", rows: Rows, scoring: Scoring) -> torch.Tensor:
        """Store the row's keys and values; return `[T, num_heads, value_head_dim]`, contiguous."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayer:
    """One attention module's shape, pool, backend and index of its KV group."""

    spec: LayerSpec
    kv: KVTensors
    backend: AttentionBackend
    group: int = 0
    sinks: torch.Tensor | None = None
    """float32 `[num_heads]`: scores without values, which add to the weights of the softmax."""
    biases: torch.Tensor | None = None
    """float32 `[num_heads, columns]`: added to scores, by the position of the key.

    A layer with biases has no sinks: the native kernel shifts scores by a row's own bias."""
    bias_origin: int | None = None
    """The column of a row's own key, where columns are distances and the keys before it have those
    before it: the precision is then that of the distance. None: columns are positions."""
    compression: Compression | None = None
    """What makes compressed entries of the module's rows."""
    place: Place | None = None
    """Where such a layer, or one beside it, keeps them and its rows."""


class LayersInTurn:
    """The layers of a module that attends several times in a step.

    Such as those of HRM-Text, which are repeated, and of DiffLlama, which attend to two kinds of
    values. Each call has keys and values of its own.
    """

    def __init__(self, layers: Sequence[PagedLayer]) -> None:
        self._layers = layers
        self._num_called = 0

    def __len__(self) -> int:
        return len(self._layers)

    def begin_step(self) -> None:
        """Let the next call be the first one; a forward that failed may have left others."""
        self._num_called = 0

    def next(self) -> PagedLayer:
        """Return the layer of a call."""
        layer = self._layers[self._num_called % len(self._layers)]
        self._num_called += 1
        return layer


def attending_twice(module_names: Iterable[str]) -> str | None:
    """Return the name of a module that attends several times in a step, if there is one."""
    seen: set[str] = set()
    for name in module_names:
        if name in seen:
            return name
        seen.add(name)
    return None


def set_implementation(model: nn.Module, name: str) -> None:
    """Let all modules of a model attend by the function of this name.

    transformers' own method warns of every part in config.json that has not been built.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            config._attn_implementation_internal = name


def has_own_attention(model: nn.Module) -> bool:
    """Return whether a model attends by code of its own, and not by a registered function."""
    find: Any = getattr(model, "get_decoder", None)
    decoder = model if find is None else find()
    return isinstance(decoder, PreTrainedModel) and not decoder._can_set_attn_implementation()


@contextmanager
def transformers_attention(model: nn.Module) -> Iterator[None]:
    """Let a model attend as in transformers, over rows of one text, for a while.

    Where it attends by code of its own, in the form that transformers prefers: Falcon's plain form
    adds its biases twice.
    """
    is_own = has_own_attention(model)
    whole = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    plain = whole.get_correct_attn_implementation(None) if is_own else "eager"
    set_implementation(model, plain)
    try:
        yield
    finally:
        set_implementation(model, OWN_ATTENTION if is_own else IMPLEMENTATION)


def paged_attention(  # noqa: PLR0917 (the signature is transformers')
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    position_bias: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attend for one module with a `paged_layer`: the function that transformers calls.

    Takes `[1, heads, T, dim]`; returns `[1, T, num_heads, value_head_dim]` and no weights. The
    probe checked `kwargs` when the model was loaded. A mask is one of key biases, and biases by
    position are those by distance (score_terms.py).
    """
    layer = cast(PagedLayer | LayersInTurn, module.paged_layer)
    if isinstance(layer, LayersInTurn):
        layer = layer.next()
    scale = layer.spec.head_dim**-0.5 if scaling is None else scaling
    if isinstance(attention_mask, torch.Tensor):  # ALL_TOKENS (indexers.py) hides nothing
        query, key = with_key_biases(query, key, attention_mask, scale)
    scoring = Scoring(
        scale,
        softcap,
        None if position_bias is None else position_bias[0].transpose(0, 1),
        None if sinks is None else sinks[0, :, :, 0].t().float().contiguous(),
    )
    rows = Rows(*(tensor[0].transpose(0, 1) for tensor in (query, key, value)))
    return layer.backend.attend(layer, rows, scoring).unsqueeze(0), None
