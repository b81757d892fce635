"""Reads what a model computes before and after its layers: embedding, angles, last norm, logits."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from worker_proc.decoder.angles import AngleCall, AngleTable
from worker_proc.decoder.stack import restore_forwards
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.output_layer import output_layer
from worker_proc.modules.packed_linear import NativeLinear
from worker_proc.modules.packed_table import PackedTable
from worker_proc.modules.pointwise import FusedRMSNorm
from worker_proc.native.packed_weights import Format, PackedWeight

_NUM_TOKENS = 5
"""Number of tokens in the text that is used to read a decoder."""


class LogitEdit(NamedTuple):
    """The operations that a model applies to its logits, in its dtype."""

    divisor: float | None
    cap: float | None

    def apply(self, logits: torch.Tensor) -> None:
        """Change logits in place."""
        if self.divisor is not None:
            logits.div_(self.divisor)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)


class Ends(NamedTuple):
    """The computation of a model before and after its layers."""

    table: torch.Tensor | PackedWeight
    """The embedding table."""
    num_tokens: int
    """The number of rows of the table."""
    factor: float
    """Factor that multiplies the embedding."""
    angles: list[AngleTable]
    """A table for each kind of angles."""
    kinds: list[int]
    """The kind of angles of each layer."""
    norm: FusedRMSNorm
    head: NativeLinear
    is_divided: bool
    """True if the head computes the logits of some tokens, and other ranks those of the others."""
    edit: LogitEdit


class _Calls(NamedTuple):
    """Inputs and outputs of a model's parts in one forward."""

    tokens: list[torch.Tensor]
    hidden: list[torch.Tensor]
    """The input of each layer."""
    used: list[Any]
    """The angles that each layer received."""
    made: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]]
    """Calls of the decoder's other modules, with their outputs."""


def read_ends(loaded: LoadedModel, layers: Sequence[nn.Module]) -> Ends | None:
    """Return the parts around the layers; None: there are no instructions for one of them."""
    model: Any = loaded.model
    decoder, embedding = model.get_decoder(), model.get_input_embeddings()
    norm, head = getattr(decoder, "norm", None), output_layer(model)
    if not isinstance(embedding, nn.Embedding) or not isinstance(norm, FusedRMSNorm):
        return None
    if not isinstance(head, NativeLinear) or not _fits(embedding, norm, head, loaded.dtype):
        return None
    tokens = torch.arange(_NUM_TOKENS).unsqueeze(0) * 7919 % loaded.vocab_size
    positions = torch.arange(_NUM_TOKENS).unsqueeze(0)
    with torch.inference_mode(), _recorded(decoder, embedding, layers) as calls:
        decoder(input_ids=tokens, position_ids=positions, use_cache=False)
    if len(calls.tokens) != 1 or len(calls.used) != len(layers):
        return None
    found = _angles(calls, loaded.model_len)
    factor = _factor(loaded, embedding, calls)
    if found is None or factor is None:
        return None
    config = model.config.get_text_config()
    edit = LogitEdit(
        getattr(config, "logits_scaling", None), getattr(config, "final_logit_softcapping", None)
    )
    tables, kinds = found
    table = embedding.weight.detach()
    return Ends(
        table.packed if isinstance(table, PackedTable) else table,
        len(table),
        factor,
        tables,
        kinds,
        norm,
        head,
        head.out_features < loaded.vocab_size,
        edit,
    )


def _fits(
    embedding: nn.Embedding, norm: FusedRMSNorm, head: NativeLinear, dtype: torch.dtype
) -> bool:
    size = embedding.weight.shape[1]
    return (
        embedding.weight.dtype == head.weight.dtype == dtype
        and embedding.weight.is_contiguous()
        and len(norm.factors) == head.in_features == size
        and head.packed.format is not Format.INT8_FOR_CODES
        and head.packed.order is None
    )


@contextmanager
def _recorded(
    decoder: nn.Module, embedding: nn.Module, layers: Sequence[nn.Module]
) -> Iterator[_Calls]:
    """Record the inputs and outputs of a decoder's parts; the layers compute nothing."""
    calls = _Calls([], [], [], [])

    def record_layer(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if len(args) == 1 and "position_embeddings" in kwargs:
            calls.hidden.append(args[0])
            calls.used.append(kwargs["position_embeddings"])

    def record_made(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: object
    ) -> None:
        calls.made.append((module, args, kwargs, output))

    for layer in layers:
        layer.__dict__["forward"] = lambda hidden_states, *_, **__: hidden_states
    handles = [layer.register_forward_pre_hook(record_layer, with_kwargs=True) for layer in layers]
    handles += [
        part.register_forward_hook(record_made, with_kwargs=True)
        for part in decoder.children()
        if part is not embedding and not isinstance(part, nn.ModuleList)
    ]
    handles.append(
        embedding.register_forward_pre_hook(lambda _, args: calls.tokens.append(args[0]))
    )
    try:
        yield calls
    finally:
        restore_forwards(layers)
        for handle in handles:
            handle.remove()


def _angles(calls: _Calls, model_len: int) -> tuple[list[AngleTable], list[int]] | None:
    """Return a table for each kind of angles, and the kind of each layer.

    Returns None if the module that computes them was not found, or if they depend on more than the
    position.
    """
    makers: list[AngleCall] = []
    kinds: list[int] = []
    seen: list[Any] = []
    for used in calls.used:
        kind = next((kind for kind, one in enumerate(seen) if one is used), None)
        if kind is None:
            call = next((call for call in calls.made if call[3] is used), None)
            positions = None if call is None else _positions_of(call, calls.tokens[0].shape)
            if call is None or positions is None:
                return None
            maker = AngleCall(*call[:3], positions)
            if not maker.depends_on_positions_alone(model_len):
                return None
            kind = len(seen)
            seen.append(used)
            makers.append(maker)
        kinds.append(kind)
    return [AngleTable(maker, model_len) for maker in makers], kinds


def _positions_of(
    call: tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any], shape: torch.Size
) -> torch.Tensor | None:
    """Return the positions that a call received, or None."""
    _, args, kwargs, _ = call
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor) and value.dtype == torch.long and value.shape == shape:
            return value
    return None


@torch.inference_mode()
def _factor(loaded: LoadedModel, embedding: nn.Embedding, calls: _Calls) -> float | None:
    """Return the factor between the embedding and the first layer's input; None: it is unknown."""
    rows = functional.embedding(calls.tokens[0], embedding.weight)
    size, config = rows.shape[-1], loaded.model.config.get_text_config()
    root = math.sqrt(size)
    factors = [1.0, float(torch.tensor(root, dtype=loaded.dtype)), root]
    factors.append(float(getattr(config, "embedding_multiplier", None) or 1.0))
    for factor in factors:
        if torch.equal((rows.float() * factor).to(rows.dtype), calls.hidden[0]):
            return factor
    return None
