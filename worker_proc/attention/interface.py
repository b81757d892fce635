"""Connects transformers' attention modules to the paged KV cache.

`paged_attention` is registered with transformers under the name `IMPLEMENTATION`. No mask function
is registered under that name, so transformers builds no mask: the positions that a token attends to
follow from the step's inputs.
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
    softcap: float | None  # bound that scores approach through tanh
    biases: torch.Tensor | None = None
    """`[T, num_heads, distances]`: the bias that each query adds to the scores of preceding keys,
    by distance; distance 0 is its own key. Keys that are further away have no bias."""
    sinks: torch.Tensor | None = None
    """float32 `[T, num_heads]`: a sink for each query and head, which replaces the layer's
    sinks."""


class AttentionBackend(Protocol):
    """A method of computing attention over the pool; holds the current step's metadata."""

    name: str
    """Shown in logs and status pages."""
    depends_on_batch: bool
    """True if a row's result may depend on other rows in the batch, or on how its text is
    chunked."""

    def pool_shapes(self, spec: LayerSpec, num_blocks: int) -> Shapes:
        """Return the shapes of a layer's key pool and value pool; latent layers have no values."""

    def begin_step(self, inputs: StepInputs) -> None:
        """Build the indices that the layers share; called once before each step's forward."""

    def attend(self, layer: "PagedLayer", rows: Rows, scoring: Scoring) -> torch.Tensor:
        """Store the rows' keys and values; return `[T, num_heads, value_head_dim]`, contiguous."""


@dataclass(frozen=True, slots=True, eq=False)
class PagedLayer:
    """An attention module's shape, pool and backend, and the index of its KV group."""

    spec: LayerSpec
    kv: KVTensors
    backend: AttentionBackend
    group: int = 0
    sinks: torch.Tensor | None = None
    """float32 `[num_heads]`: scores without values, which only enlarge the softmax denominator."""
    biases: torch.Tensor | None = None
    """float32 `[num_heads, columns]`: added to scores, by the key's position.

    A layer with biases has no sinks, since the native kernel shifts scores by a row's own bias.
    """
    bias_origin: int | None = None
    """The column of a row's own key, if columns are distances: preceding keys use the preceding
    columns, and precision depends on the distance alone. None: columns are positions."""
    compression: Compression | None = None
    """The module's compressor, which builds compressed entries from its rows."""
    place: Place | None = None
    """Where the pool holds a compressing model's rows and entries for this layer."""


class LayersInTurn:
    """The layers of a module that attends several times in a step, in call order.

    HRM-Text repeats its layers, and DiffLlama attends to two sets of values. Each call has its own
    keys and values.
    """

    def __init__(self, layers: Sequence[PagedLayer]) -> None:
        self._layers = layers
        self._num_called = 0

    def __len__(self) -> int:
        return len(self._layers)

    def begin_step(self) -> None:
        """Restart at the first call; a forward that failed may have stopped midway."""
        self._num_called = 0

    def next(self) -> PagedLayer:
        """Return the layer of the current call."""
        layer = self._layers[self._num_called % len(self._layers)]
        self._num_called += 1
        return layer


def attending_twice(module_names: Iterable[str]) -> str | None:
    """Return the name of a module that attends several times in a step, or None."""
    seen: set[str] = set()
    for name in module_names:
        if name in seen:
            return name
        seen.add(name)
    return None


def set_implementation(model: nn.Module, name: str) -> None:
    """Make all modules of a model attend through the function registered under `name`.

    transformers' own method logs a warning for each part of config.json that has not been built.
    """
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PretrainedConfig):
            config._attn_implementation_internal = name


def has_own_attention(model: nn.Module) -> bool:
    """Return whether a model's own code computes attention, instead of a registered function."""
    find: Any = getattr(model, "get_decoder", None)
    decoder = model if find is None else find()
    return isinstance(decoder, PreTrainedModel) and not decoder._can_set_attn_implementation()


@contextmanager
def transformers_attention(model: nn.Module) -> Iterator[None]:
    """Use transformers' attention, over rows of a single text, within the context.

    A model whose own code computes attention uses the implementation that transformers prefers,
    because Falcon's eager implementation adds its biases twice.
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
    """Attend for a module that has a `paged_layer`; transformers calls this function.

    Takes `[1, heads, T, dim]`; returns `[1, T, num_heads, value_head_dim]` and no weights. The
    probe checked `kwargs` when the model was loaded. An attention mask holds key biases here, and
    position biases are indexed by distance (score_terms.py).
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
