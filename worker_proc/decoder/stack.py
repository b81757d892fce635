"""All decoder layers of a model, computed by one native call.

The layers' modules stay in transformers' model. While a stack is installed they pass the hidden
states on unchanged and note their angles; the last one computes all of them. Everything else stays
transformers' code over packed modules: the embedding, the angles, the last norm and the output
layer.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from worker_proc.attention.interface import AttentionBackend, PagedLayer
from worker_proc.attention.native import NativeBackend
from worker_proc.decoder.layers import DecoderLayer, LayerSettings, read_layer
from worker_proc.loading.experts import ExpertBuffers, FusedExperts
from worker_proc.loading.fused import FusedMLP, FusedRMSNorm
from worker_proc.loading.layer_executor import Angles, Stack
from worker_proc.native.kernels import (
    BufferArgs,
    Epilogue,
    Instruction,
    Kind,
    NativeLibrary,
    PackedWeight,
    ProgramArgs,
    RunArgs,
    projection,
    row_stride,
)

HIDDEN, NORMED, QKV, ATTENDED, INNER, PROJECTED = range(6)
LOGITS, CHOICES, GATHERED, EXPERT_INNER = range(6, 10)
"""Of mixtures of experts: GATHERED and EXPERT_INNER have a row for each expert of each token."""
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
        hidden_size = layers[0].hidden_size
        mixtures = [layer.mlp for layer in layers if isinstance(layer.mlp, FusedExperts)]
        mlps = [layer.mlp for layer in layers if isinstance(layer.mlp, FusedMLP)]
        widths = {
            HIDDEN: hidden_size,
            NORMED: hidden_size,
            QKV: max(sum(part.num_outputs for part in layer.qkv) for layer in layers),
            ATTENDED: max(_num_inputs(layer.out, dtype) for layer in layers),
            INNER: max((mlp.size for mlp in mlps), default=0),
            PROJECTED: hidden_size,
            LOGITS: max((mixture.num_experts for mixture in mixtures), default=0),
            CHOICES: max((mixture.choice_width for mixture in mixtures), default=0),
            GATHERED: hidden_size if mixtures else 0,
            EXPERT_INNER: max((mixture.size for mixture in mixtures), default=0),
        }
        num_chosen = max((mixture.routing.num_chosen for mixture in mixtures), default=0)
        self._hidden_size = hidden_size
        self._strides = [row_stride(widths[i], dtype.itemsize) for i in range(len(widths))]
        self._rows_of_token = [1] * GATHERED + [num_chosen] * 2
        self._max_rows = 0
        self._hidden = torch.empty(0, hidden_size, dtype=dtype)
        """The first buffer, which keeps the memory of all."""
        self._buffers = (BufferArgs * len(widths))()
        self._program: Program | None = None

    def forward(self, hidden_states: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        """Return `[1, T, hidden_size]` after the last layer, given the angles of each layer."""
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
        self._library.execute(program.args, run)
        return hidden[:, : self._hidden_size].clone().unsqueeze(0)

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
            rows = memory[start : start + sizes[HIDDEN]]
            self._hidden = rows.view(self._dtype).view(self._max_rows, -1)
            for index, (size, stride) in enumerate(zip(sizes, self._strides, strict=True)):
                self._buffers[index] = BufferArgs(memory.data_ptr() + start, stride)
                start += size
        return self._hidden[:num_rows]

    def _program_for(self, angles: Sequence[Angles]) -> "Program":
        """Return the program for the present pool and for which layers share angles."""
        paged = [layer.paged for layer in self._layers]
        first_of: dict[int, int] = {}
        kinds = [first_of.setdefault(id(cosine), len(first_of)) for cosine, _ in angles]
        key = (*map(id, paged), *kinds)
        if self._program is None or self._program.key != key:
            backend = _backend_of(paged[0])
            instructions = [
                instruction
                for layer, settings, kind, (cosine, _) in zip(
                    self._layers, self._settings, kinds, angles, strict=True
                )
                for instruction in _layer(layer, settings, backend, kind, cosine)
            ]
            first_layers = [kinds.index(kind) for kind in range(len(first_of))]
            self._program = Program(
                key, paged, first_layers, instructions, self._dtype == torch.bfloat16
            )
        return self._program


def _backend_of(layer: PagedLayer) -> NativeBackend:
    assert isinstance(layer.backend, NativeBackend)
    return layer.backend


class Program:
    """The instructions for one pool, with all that they point to."""

    def __init__(
        self,
        key: tuple[int, ...],
        paged: list[PagedLayer],
        first_layers: list[int],
        instructions: list[Instruction],
        is_bf16: bool,
    ) -> None:
        self.key = key
        self.first_layers = first_layers
        """For each kind of angles, the first layer that has it."""
        self._paged = paged  # alive, so that the key stays unique
        self._array = (Instruction * len(instructions))(*instructions)
        self.args = ProgramArgs(ctypes.addressof(self._array), len(instructions), is_bf16)


def _layer(
    layer: DecoderLayer,
    settings: LayerSettings,
    backend: NativeBackend,
    angles: int,
    cosines: torch.Tensor,
) -> list[Instruction]:
    """Return the instructions of one layer; `angles` is the number of its kind of angles."""
    norms, paged, factor = layer.norms, layer.paged, layer.residual_factor
    program, source = _normed(norms.before_attention)
    program += _queries_and_keys(layer, source)
    rotate = Instruction(
        kind=Kind.ROTATE,
        source=QKV,
        num_heads=paged.spec.num_heads,
        num_kv_heads=paged.spec.num_kv_heads,
        head_dim=paged.spec.head_dim,
        num_rotated=cosines.shape[-1],
        angles=angles,
        has_wide_angles=cosines.dtype == torch.float32,
        rotation=settings.rotation,
    )
    if layer.query_norm is not None and layer.key_norm is not None and layer.norms_each_head:
        rotate.query_norm = layer.query_norm.weight.data_ptr()
        rotate.key_norm = layer.key_norm.weight.data_ptr()
        rotate.epsilon = layer.query_norm.epsilon
        rotate.rounds_first = layer.query_norm.round_first
    attend = Instruction(
        kind=Kind.ATTEND,
        source=QKV,
        target=ATTENDED,
        group=paged.group,
        scale=settings.scale,
        softcap=settings.softcap,
        layer=ctypes.addressof(backend.layer_args(paged)),
    )
    program += [rotate, attend, *_residual(layer.out, ATTENDED, norms.after_attention, factor)]
    before_mlp, source = _normed(norms.before_mlp)
    program += before_mlp
    if isinstance(layer.mlp, FusedExperts):
        buffers = ExpertBuffers(source, LOGITS, CHOICES, GATHERED, EXPERT_INNER, PROJECTED)
        program += layer.mlp.instructions(buffers)
        return program + _added(norms.after_mlp, layer.hidden_size, factor)
    activate = {"epilogue": Epilogue.ACTIVATE, "activation": layer.mlp.activation}
    program.append(projection(layer.mlp.gate_up, source=source, target=INNER, **activate))
    assert layer.down is not None
    return program + _residual(layer.down, INNER, norms.after_mlp, factor)


def _normed(norm: FusedRMSNorm | None) -> tuple[list[Instruction], int]:
    """Return the instructions for a norm of the residual, if any, and the buffer of the result."""
    return ([], HIDDEN) if norm is None else ([_norm(norm, HIDDEN, NORMED)], NORMED)


def _queries_and_keys(layer: DecoderLayer, source: int) -> list[Instruction]:
    """Return the projections to queries, keys and values, and norms of all heads together."""
    spec = layer.paged.spec
    first_key = spec.num_heads * spec.head_dim
    columns = (0, first_key, first_key + spec.num_kv_heads * spec.head_dim)
    # Each writes whole panels: what it writes past its outputs is overwritten by the next.
    program = [
        projection(weight, source=source, target=QKV, column=column)
        for weight, column in zip(layer.qkv, columns, strict=False)
    ]
    if layer.query_norm is not None and layer.key_norm is not None and not layer.norms_each_head:
        program.append(_norm(layer.query_norm, QKV, QKV))
        program.append(_norm(layer.key_norm, QKV, QKV, column=first_key))
    return program


def _residual(
    weight: PackedWeight, source: int, norm: FusedRMSNorm | None, factor: float
) -> list[Instruction]:
    """Project back to the residual and add to it, with a norm between or without."""
    if norm is None:
        adding = {"epilogue": Epilogue.ADD_TO, "factor": factor}
        return [projection(weight, source=source, target=HIDDEN, **adding)]
    projected = projection(weight, source=source, target=PROJECTED)
    return [projected, *_added(norm, len(norm.weight), factor)]


def _added(norm: FusedRMSNorm | None, size: int, factor: float) -> list[Instruction]:
    """Add what is projected to the residual, with a norm before or without."""
    add = Instruction(kind=Kind.ADD, source=PROJECTED, target=HIDDEN, size=size, factor=factor)
    return [add] if norm is None else [_norm(norm, PROJECTED, PROJECTED), add]


def _norm(norm: FusedRMSNorm, source: int, target: int, column: int = 0) -> Instruction:
    return Instruction(
        kind=Kind.NORMALIZE,
        source=source,
        target=target,
        size=len(norm.weight),
        column=column,
        weight=norm.weight.data_ptr(),
        epsilon=norm.epsilon,
        rounds_first=norm.round_first,
    )


def _num_inputs(weight: PackedWeight, dtype: torch.dtype) -> int:
    return weight.num_units * 4 // dtype.itemsize


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
