"""All decoder layers of a model, computed by one native call.

The layers' modules stay in transformers' model. While a stack is installed they pass the hidden
states on unchanged and note their angles; the last one computes all of them. Everything else stays
transformers' code over packed modules: the embedding, the angles, the last norm and the output
layer.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from worker_proc.attention.interface import AttentionBackend, PagedLayer
from worker_proc.attention.native import NativeBackend
from worker_proc.decoder.hooks import Columns, Hook, HookPoint
from worker_proc.decoder.layers import DecoderLayer, LayerSettings, read_layer
from worker_proc.decoder.program import (
    ATTENDED,
    CHOICES,
    EXPERT_INNER,
    GATES,
    GATHERED,
    HIDDEN,
    INNER,
    LOGITS,
    NORMED,
    PROJECTED,
    QKV,
    SPLIT,
    Program,
    ProgramWriter,
    codes_stride,
    hooked_projections,
    split_width,
)
from worker_proc.loading.experts import FusedExperts
from worker_proc.loading.fused import FusedMLP
from worker_proc.loading.layer_executor import Angles, Stack
from worker_proc.native.kernels import (
    BufferArgs,
    NativeLibrary,
    RunArgs,
    row_stride,
)

_ROW_BYTES = 64


class NativeExecutor:
    """Reads layers, and computes them by the native library."""

    name = "native"

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def covers(self, backend: AttentionBackend) -> bool:
        return isinstance(backend, NativeBackend)

    def read(self, module: nn.Module, factor: float) -> DecoderLayer | None:
        """Return what a layer computes; None: there are no instructions for a part of it."""
        return read_layer(module, factor)

    def stack(
        self,
        layers: Sequence[DecoderLayer],
        settings: Sequence[LayerSettings],
        dtype: torch.dtype,
    ) -> "DecoderStack":
        """Return what computes the layers."""
        return DecoderStack(self._library, layers, settings, dtype)


class DecoderStack:
    """Computes layers whose attention modules are attached to a pool and a `NativeBackend`."""

    def __init__(
        self,
        library: NativeLibrary,
        layers: Sequence[DecoderLayer],
        settings: Sequence[LayerSettings],
        dtype: torch.dtype,
    ) -> None:
        """Take layers of one hidden size, and what their modules do not show."""
        self._library = library
        self._layers = layers
        self._settings = settings
        self._dtype = dtype
        self._hidden_size = layers[0].hidden_size
        self._hooks: Mapping[HookPoint, Hook] = {}
        self._clear()

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def set_hooks(self, hooks: Mapping[HookPoint, Hook]) -> None:
        """Call these hooks at their points, and no others, in all later steps.

        Each cuts the program: without hooks, a step is one native call. ValueError: a layer or
        projection is not there.
        """
        for layer, name, _ in hooks:
            if not 0 <= layer < len(self._layers):
                raise ValueError(f"layer {layer} is not among the {len(self._layers)} layers")
            if name not in hooked_projections(self._layers[layer]):
                raise ValueError(f"layer {layer} has experts, and no hooks around {name}")
        self._hooks = dict(hooks)
        self._clear()

    def forward(self, hidden_states: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        """Return `[1, T, hidden_size]` after the last layer, given the angles of each layer."""
        return self.forward_layers(range(len(self._layers)), hidden_states, angles)

    def forward_layers(
        self, layers: range, hidden_states: torch.Tensor, angles: Sequence[Angles]
    ) -> torch.Tensor:
        """Return what `forward` does after some consecutive layers, given the angles of all.

        `hidden_states` are those before the first of them: the residual, which is all that passes
        from a layer to the next one.
        """
        if not (layers.step == 1 and 0 <= layers.start < layers.stop <= len(self._layers)):
            raise ValueError(f"{layers} are not consecutive layers of {len(self._layers)}")
        rows = hidden_states[0]
        program = self._program_for(angles)
        hidden = self._reserve(len(rows))
        hidden[:, : self._hidden_size] = rows
        hidden[:, self._hidden_size :] = 0  # an earlier request's may not be finite
        kinds = [angles[layer] for layer in program.first_layers]
        cosines = [cosine[0].contiguous() for cosine, _ in kinds]
        sines = [sine[0].contiguous() for _, sine in kinds]
        arrays = (
            _pointers([tensor.data_ptr() for tensor in cosines]),
            _pointers([tensor.data_ptr() for tensor in sines]),
            _pointers(
                [ctypes.addressof(step) for step in _backend_of(self._layers[0].paged).steps]
            ),
        )
        run = RunArgs(
            ctypes.addressof(self._buffers),
            ctypes.addressof(arrays[2]),
            ctypes.addressof(arrays[0]),
            ctypes.addressof(arrays[1]),
            len(rows),
        )
        for segment in program.segments(layers):
            self._library.execute(segment.args, run)
            for cut in segment.cuts:
                inputs = self._view(cut.inputs, len(rows))
                self._hooks[cut.point](inputs, self._view(cut.outputs, len(rows)))
        return hidden[:, : self._hidden_size].clone().unsqueeze(0)

    def _clear(self) -> None:
        """Forget the program, and the memory of its buffers."""
        widths = self._widths()
        mixtures = [layer.mlp for layer in self._layers if isinstance(layer.mlp, FusedExperts)]
        num_chosen = max((mixture.routing.num_chosen for mixture in mixtures), default=0)
        self._strides = [row_stride(widths[i], self._dtype.itemsize) for i in range(len(widths))]
        self._strides.append(max(map(codes_stride, self._layers)))
        self._rows_of_token = [1] * GATHERED + [num_chosen] * 2 + [1]
        self._max_rows = 0
        self._memory: list[torch.Tensor] = []
        """The rows of each buffer."""
        self._buffers = (BufferArgs * len(self._strides))()
        self._program: Program | None = None

    def _widths(self) -> dict[int, int]:
        """Return the values in a row of each buffer."""
        layers = self._layers
        mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, FusedExperts)]
        mlps = [layer.mlp for layer in layers if isinstance(layer.mlp, FusedMLP)]
        splits = any(name in GATES for _, name, _ in self._hooks)
        return {
            HIDDEN: self._hidden_size,
            NORMED: self._hidden_size,
            QKV: max(sum(part.num_outputs for part in layer.qkv) for layer in layers),
            ATTENDED: max(layer.out.num_inputs for layer in layers),
            INNER: max((mlp.size for mlp in mlps), default=0),
            PROJECTED: self._hidden_size,
            SPLIT: max(map(split_width, mlps)) if splits else 0,
            LOGITS: max((mixture.num_experts for mixture in mixtures), default=0),
            CHOICES: max((mixture.choice_width for mixture in mixtures), default=0),
            GATHERED: self._hidden_size if mixtures else 0,
            EXPERT_INNER: max((mixture.size for mixture in mixtures), default=0),
        }

    def _view(self, columns: Columns, num_rows: int) -> torch.Tensor:
        end = columns.first + columns.width
        return self._memory[columns.buffer][:num_rows, columns.first : end]

    def _reserve(self, num_rows: int) -> torch.Tensor:
        """Make room for this many rows; returns those of the hidden states, and what fills them up.

        Other rows are zero past their values, and stay so: the buffers move only when they grow.
        """
        if num_rows > self._max_rows:
            self._max_rows = num_rows + num_rows // 4
            sizes = [
                self._max_rows * num_rows * stride
                for num_rows, stride in zip(self._rows_of_token, self._strides, strict=True)
            ]
            memory = torch.zeros(sum(sizes) + _ROW_BYTES, dtype=torch.uint8)
            start = -memory.data_ptr() % _ROW_BYTES
            self._memory = []
            for index, (size, stride) in enumerate(zip(sizes, self._strides, strict=True)):
                part = memory[start : start + size].view(self._dtype)
                self._memory.append(part.view(-1, stride // self._dtype.itemsize))
                self._buffers[index] = BufferArgs(memory.data_ptr() + start, stride)
                start += size
        return self._memory[HIDDEN][:num_rows]

    def _program_for(self, angles: Sequence[Angles]) -> Program:
        """Return the program for the present pool and for which layers share angles."""
        paged = [layer.paged for layer in self._layers]
        first_of: dict[int, int] = {}
        kinds = [first_of.setdefault(id(cosine), len(first_of)) for cosine, _ in angles]
        key = (*map(id, paged), *kinds)
        if self._program is None or self._program.key != key:
            writer = ProgramWriter(self._hooks.keys())
            for layer, settings, kind, (cosine, _) in zip(
                self._layers, self._settings, kinds, angles, strict=True
            ):
                writer.add_layer(layer, settings, kind, cosine)
            first_layers = [kinds.index(kind) for kind in range(len(first_of))]
            is_bf16 = self._dtype == torch.bfloat16
            self._program = Program(key, paged, first_layers, writer, is_bf16)
        return self._program


def _backend_of(layer: PagedLayer) -> NativeBackend:
    assert isinstance(layer.backend, NativeBackend)
    return layer.backend


def _pointers(addresses: list[int]) -> Any:
    return (ctypes.c_void_p * len(addresses))(*addresses)


def replace_forwards(modules: Sequence[nn.Module], stack: Stack) -> None:
    """Let the last of the layers' modules compute all layers, and the others nothing."""
    angles: list[Any] = [None] * len(modules)

    def pass_on(index: int) -> Callable[..., torch.Tensor]:
        def forward(
            hidden_states: torch.Tensor, *_: object, position_embeddings: Angles, **__: object
        ) -> torch.Tensor:
            angles[index] = position_embeddings
            if index + 1 < len(modules):
                return hidden_states
            return stack.forward(hidden_states, angles)

        return forward

    for index, module in enumerate(modules):
        module.__dict__["forward"] = pass_on(index)


def restore_forwards(modules: Sequence[nn.Module]) -> None:
    """Let each module compute its own layer again."""
    for module in modules:
        module.__dict__.pop("forward", None)
