"""All decoder layers of a model as a short list of kernels: about ten for each layer.

The layers' modules stay in transformers' model, as on the CPU (decoder/stack.py). Nothing here
depends on values of the step, so the launches can be captured in a CUDA graph.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import linear

from worker_proc.attention.interface import AttentionBackend, Scoring
from worker_proc.cuda.backend import CudaBackend
from worker_proc.cuda.layers import CudaLayer, fuse_norms, merge_matrices, read_layer
from worker_proc.cuda.pointwise import (
    TritonLibrary,
    activate_and_multiply,
    add_and_norm,
    rotate_and_store,
)
from worker_proc.cuda.products import multiply
from worker_proc.decoder.layers import LayerSettings
from worker_proc.loading.layer_executor import Angles
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.ranks import Ranks
from worker_proc.modules.rowwise_linear import Multiply, multiply_rowwise


class TritonExecutor:
    """Reads layers, and computes them with Triton kernels and torch's matrix products."""

    name = "triton"

    def __init__(self, *, is_batch_invariant: bool = False) -> None:
        self.kernels = TritonLibrary()
        self.rowwise: Multiply | None = multiply if is_batch_invariant else None
        """The function for products, if rows must not depend on the batch."""

    def covers(self, backend: AttentionBackend) -> bool:
        return isinstance(backend, CudaBackend)

    def read(self, module: nn.Module, factor: float) -> CudaLayer | None:
        """Return a layer's description; None: there are no kernels for a part of it."""
        return read_layer(module, factor, self.kernels)

    def stack(
        self, layers: Sequence[CudaLayer], settings: Sequence[LayerSettings], dtype: torch.dtype
    ) -> "CudaStack":
        """Return a stack that computes the layers."""
        return CudaStack(layers, settings, self.rowwise or linear)


def install_kernels(loaded: LoadedModel, executor: TritonExecutor) -> None:
    """Replace norms by proven kernels, and merge matrices, for modules and executor."""
    fuse_norms(loaded.model, executor.kernels, loaded.dtype)
    merge_matrices(loaded.model)
    if executor.rowwise is not None:
        multiply_rowwise(loaded.model, executor.rowwise)


class CudaStack:
    """Computes layers whose attention modules are attached to a pool and a `CudaBackend`."""

    def __init__(
        self, layers: Sequence[CudaLayer], settings: Sequence[LayerSettings], multiply: Multiply
    ) -> None:
        """Take layers of one hidden size, and the settings that their modules do not reveal."""
        self._layers = layers
        self._settings = settings
        self._multiply = multiply
        self._ranks: Ranks | None = None

    def take_ranks(self, ranks: Ranks) -> None:
        """Sum the rows of all ranks after each attention and MLP, in all later steps."""
        self._ranks = ranks

    def forward(self, hidden_states: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        """Return `[1, T, hidden_size]` after the last layer, given the angles of each layer."""
        multiply = self._multiply
        hidden = hidden_states[0].clone(memory_format=torch.contiguous_format)
        before = [layer.norms.before_attention for layer in self._layers]
        normed = add_and_norm(hidden, None, None, 1.0, before[0])
        layers = zip(self._layers, self._settings, angles, [*before[1:], None], strict=True)
        for layer, settings, layer_angles, next_norm in layers:
            norms, factor = layer.norms, layer.residual_factor
            qkv = multiply(normed, *layer.qkv)
            attended = self._attend(layer, settings, layer_angles, qkv)
            added = self._added_up(multiply(attended, *layer.out))
            normed = add_and_norm(hidden, added, norms.after_attention, factor, norms.before_mlp)
            inner = activate_and_multiply(multiply(normed, *layer.gate_up), layer.activation)
            added = self._added_up(multiply(inner, *layer.down))
            normed = add_and_norm(hidden, added, norms.after_mlp, factor, next_norm)
        return hidden.unsqueeze(0)

    def _added_up(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sums of all ranks' rows, if the layers are divided."""
        if self._ranks is not None:
            self._ranks.add(rows)
        return rows

    @staticmethod
    def _attend(
        layer: CudaLayer, settings: LayerSettings, angles: Angles, qkv: torch.Tensor
    ) -> torch.Tensor:
        paged = layer.paged
        backend = paged.backend
        assert isinstance(backend, CudaBackend)
        cosines, sines = (part[0].contiguous() for part in angles)
        query = rotate_and_store(
            backend.paged_step(paged),
            qkv,
            layer.head_norms,
            (cosines, sines),
            rotation=settings.rotation,
            spec=paged.spec,
        )
        scoring = Scoring(settings.scale, settings.softcap or None)
        return backend.attend_stored(paged, query, scoring).flatten(1)
