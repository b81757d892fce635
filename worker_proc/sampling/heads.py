"""Heads after pooling: dense layers of sentence-transformers, or a classification head.

They take one pooled row at a time, in float32, and so do not depend on the batch.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPoolingAndCrossAttentions

from protocol.config.sentence_modules import DenseLayer
from protocol.sampling import PoolingType
from worker_proc.errors import CheckpointError, UnsupportedModel

_WEIGHTS = "model.safetensors"
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda rows: rows,
    "tanh": torch.tanh,
    "gelu": functional.gelu,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
}
_TRIAL_LENGTHS = (3, 7)
_MAX_ERROR = 1e-3
_POOLINGS: dict[PoolingType, Callable[[torch.Tensor], torch.Tensor]] = {
    PoolingType.LAST: lambda rows: rows[-1],
    PoolingType.CLS: lambda rows: rows[0],
    PoolingType.MEAN: lambda rows: rows.mean(dim=0),
}
"""The poolings that classification heads may use."""


class Head(Protocol):
    """Converts the pooled hidden states of a text to its vector."""

    num_outputs: int
    modules: Sequence[nn.Module]
    """The modules that hold its weights."""

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        """Return `[num_outputs]` for `[hidden_size]`, in float64."""


class DenseHead:
    """A sequence of dense layers."""

    def __init__(self, directory: str, layers: Sequence[DenseLayer], device: torch.device) -> None:
        """Read the weights of a checkpoint's dense layers."""
        self.num_outputs = layers[-1].out_features
        loaded = [_load_dense(Path(directory) / layer.directory, layer) for layer in layers]
        self.modules: Sequence[nn.Module] = [nn.Sequential(linear).to(device) for linear in loaded]
        self._activations = [_ACTIVATIONS[layer.activation] for layer in layers]

    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        rows = pooled.float()[None]
        for module, activate in zip(self.modules, self._activations, strict=True):
            rows = activate(module(rows))
        return rows[0].double()


def check_dense(layers: Sequence[DenseLayer], hidden_size: int) -> None:
    """Raise CheckpointError if the sizes of consecutive layers do not match."""
    size = hidden_size
    for layer in layers:
        if layer.in_features != size:
            raise CheckpointError(
                f"{layer.directory}/config.json: in_features is {layer.in_features}, but"
                f" its input has {size} numbers"
            )
        size = layer.out_features


def _load_dense(directory: Path, layer: DenseLayer) -> nn.Linear:
    path = directory / _WEIGHTS
    linear = nn.Linear(layer.in_features, layer.out_features, layer.has_bias)
    linear.requires_grad_(False)
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; weights in other formats are not read")
    try:
        with safe_open(path, "pt") as file:
            for name, parameter in linear.named_parameters():
                stored = file.get_tensor(f"linear.{name}")
                if stored.shape != parameter.shape:
                    raise CheckpointError(
                        f"{path}: linear.{name} has the shape {list(stored.shape)}, and must have"
                        f" {list(parameter.shape)}"
                    )
                parameter.copy_(stored)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return linear


class SequenceHead:
    """The classification head of a transformers model, over one pooled hidden state.

    The model's own forward computes it, for a text of one token with this hidden state.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Detach the head from `model`, whose base then computes hidden states only.

        Raises UnsupportedModel if it takes other hidden states than the first, the last or their
        mean.
        """
        self._model = model
        self._base: Any = model.base_model
        self._pooler = getattr(self._base, "pooler", None)
        if self._pooler is not None:
            self._base.pooler = None
        children = [child for child in model.children() if child is not self._base]
        self.modules: Sequence[nn.Module] = [
            child.float() for child in (*children, self._pooler) if child is not None
        ]
        self._token_id = _other_than(getattr(model.config, "pad_token_id", None))
        size = model.config.get_text_config().hidden_size
        self.num_outputs = len(self(torch.zeros(size, device=model.device)))
        self.pooling = self._find_pooling(size)

    @torch.inference_mode()
    def __call__(self, pooled: torch.Tensor) -> torch.Tensor:
        return self._over(pooled.float()[None]).double()

    def _over(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of a text with these hidden states."""
        hidden = rows[None]
        pooled = None if self._pooler is None else self._pooler(hidden)
        output = BaseModelOutputWithPoolingAndCrossAttentions(
            last_hidden_state=hidden, pooler_output=pooled
        )
        token_ids = torch.full((1, len(rows)), self._token_id, device=rows.device)
        with _returning(self._base, output):
            logits: torch.Tensor = self._model(input_ids=token_ids, use_cache=False).logits[0]
        return logits

    def _find_pooling(self, size: int) -> PoolingType:
        """Return the hidden states that the head takes, from its results for irregular ones."""
        found = set(_POOLINGS)
        for length in _TRIAL_LENGTHS:
            numbers = torch.arange(length * size, device=self._model.device)
            rows = torch.sin(numbers**1.3).view(length, size)
            own = self._over(rows).double()
            scale = own.norm().clamp_min(1e-6)
            found = {
                kind
                for kind in found
                if float((self(_POOLINGS[kind](rows)) - own).norm() / scale) <= _MAX_ERROR
            }
        if len(found) != 1:
            raise UnsupportedModel(
                f"{self._model.config.model_type}: its classification head uses hidden"
                " states other than the first, the last or their mean"
            )
        return found.pop()


def check_head(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel for a classification head that `SequenceHead` does not support.

    `model` is on the meta device. Its head gets random weights, and its base is lost.
    """
    stub = nn.Module()
    stub.register_module("pooler", getattr(model.base_model, "pooler", None))
    setattr(model, model.base_model_prefix, stub)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.requires_grad_(False).normal_(generator=generator)
    with torch.inference_mode(), contextlib.suppress(AttributeError):  # it uses a part of its base
        SequenceHead(model.eval())


def _other_than(token_id: int | None) -> int:
    return 1 if token_id == 0 else 0


@contextmanager
def _returning(module: nn.Module, output: object) -> Iterator[None]:
    """Make a module return `output` within the context."""
    module.__dict__["forward"] = lambda *_, **__: output
    try:
        yield
    finally:
        del module.__dict__["forward"]
