"""All decoder layers of a model, computed by one native call.

The layers' modules stay in transformers' model. While a stack is installed, they pass the hidden
states on unchanged and record their angles; the last one computes all layers. Everything else is
transformers' code over packed modules, unless whole.py computes it, too.
"""

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from worker_proc.adapters.rows import StepRows
from worker_proc.adapters.sites import Site
from worker_proc.attention.interface import AttentionBackend, PagedLayer
from worker_proc.attention.native import NativeBackend
from worker_proc.decoder.buffers import Buffers
from worker_proc.decoder.hooks import Hook, HookPoint, Projection
from worker_proc.decoder.layers import DecoderLayer, LayerSettings, read_layer
from worker_proc.decoder.program import GATES, ProgramWriter
from worker_proc.decoder.segments import Program
from worker_proc.loading.layer_executor import Angles, Stack
from worker_proc.loading.ranks import Ranks
from worker_proc.modules.experts.mixture import FusedExperts
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.structures import ProgramArgs, RunArgs


class NativeExecutor:
    """Reads layers, and computes them with the native library."""

    name = "native"

    def __init__(self, library: NativeLibrary) -> None:
        self._library = library

    def covers(self, backend: AttentionBackend) -> bool:
        return isinstance(backend, NativeBackend)

    def read(self, module: nn.Module, factor: float) -> DecoderLayer | None:
        """Return a layer's description; None: there are no instructions for a part of it."""
        return read_layer(module, factor)

    def stack(
        self,
        layers: Sequence[DecoderLayer],
        settings: Sequence[LayerSettings],
        dtype: torch.dtype,
    ) -> "DecoderStack":
        """Return a stack that computes the layers."""
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
        """Take layers of one hidden size, and the settings that their modules do not reveal."""
        self.library = library
        self.layers = layers
        self.settings = settings
        self.dtype = dtype
        self._hidden_size = layers[0].hidden_size
        self._hooks: Mapping[HookPoint, Hook] = {}
        self._rows: StepRows | None = None
        self.sites: Mapping[tuple[int, Projection], tuple[int, Site]] = {}
        """The numbered sites of projections that take adapters, by layer."""
        self.ranks: Ranks | None = None
        """The ranks that have the other parts of the layers."""
        self._clear()

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def has_hooks(self) -> bool:
        return bool(self._hooks)

    def step_addresses(self) -> Any:
        """Return the addresses of the current step, for each KV group."""
        steps = _backend_of(self.layers[0].paged).steps
        return pointers([ctypes.addressof(step) for step in steps])

    def set_hooks(self, hooks: Mapping[HookPoint, Hook]) -> None:
        """Set the hooks for all later steps, replacing earlier ones.

        Each hook cuts the program: without hooks, a step is one native call. Raises ValueError if a
        layer or projection does not exist.
        """
        for layer, name, _ in hooks:
            if not 0 <= layer < len(self.layers):
                raise ValueError(f"layer {layer} is not among the {len(self.layers)} layers")
            if name not in _hooked_projections(self.layers[layer]):
                raise ValueError(f"layer {layer} has experts, and no hooks around {name}")
        self._hooks = dict(hooks)
        self._clear()

    def take_adapters(
        self, rows: StepRows, sites: Mapping[tuple[int, Projection], tuple[int, Site]]
    ) -> None:
        """Add adapter products at these sites, in all later steps with adapters."""
        self._rows, self.sites = rows, sites
        self._clear()

    def take_ranks(self, ranks: Ranks) -> None:
        """Sum the rows of all ranks after each attention and MLP, in all later steps.

        Raises ValueError if the rows are too long.
        """
        ranks.check_row(self._hidden_size * self.dtype.itemsize)
        self.ranks = ranks
        self._clear()

    def execute(self, program: ProgramArgs, run: RunArgs) -> None:
        """Execute a program over this stack's layers."""
        if self.ranks is None:
            self.library.execute(program, run)
        else:
            self.ranks.execute(program, run)

    @property
    def adaptation(self) -> int | None:
        """The address of the current step's adapted rows; None: no adapters."""
        return None if self._rows is None else self._rows.address

    def forward(self, hidden_states: torch.Tensor, angles: Sequence[Angles]) -> torch.Tensor:
        """Return `[1, T, hidden_size]` after the last layer, given the angles of each layer."""
        return self.forward_layers(range(len(self.layers)), hidden_states, angles)

    def forward_layers(
        self, layers: range, hidden_states: torch.Tensor, angles: Sequence[Angles]
    ) -> torch.Tensor:
        """Return the hidden states after `layers`, which are consecutive, given the angles of all.

        `hidden_states` precede the first of them: the residual is all that a layer passes to the
        next.
        """
        if not (layers.step == 1 and 0 <= layers.start < layers.stop <= len(self.layers)):
            raise ValueError(f"{layers} are not consecutive layers of {len(self.layers)}")
        rows = hidden_states[0]
        adaptation = self.adaptation
        program = self._program_for(angles, is_adapted=adaptation is not None)
        hidden = self.buffers.reserve(len(rows))
        hidden[:, : self._hidden_size] = rows
        hidden[:, self._hidden_size :] = 0  # values of an earlier request may not be finite
        kinds = [angles[layer] for layer in program.first_layers]
        cosines = [cosine[0].contiguous() for cosine, _ in kinds]
        sines = [sine[0].contiguous() for _, sine in kinds]
        arrays = (
            self.step_addresses(),
            pointers([tensor.data_ptr() for tensor in cosines]),
            pointers([tensor.data_ptr() for tensor in sines]),
        )
        run = RunArgs(
            self.buffers.address,
            *map(ctypes.addressof, arrays),
            adaptation=adaptation,
            num_rows=len(rows),
        )
        for segment in program.segments(layers):
            self.execute(segment.args, run)
            for cut in segment.cuts:
                inputs = self.buffers.view(cut.inputs, len(rows))
                self._hooks[cut.point](inputs, self.buffers.view(cut.outputs, len(rows)))
        return hidden[:, : self._hidden_size].clone().unsqueeze(0)

    def _clear(self) -> None:
        """Drop the program, and the memory of its buffers."""
        self.buffers = Buffers(self.layers, self.dtype, splits=self._splits())
        self._programs: dict[bool, Program] = {}
        """The program with adapters and the program without."""

    def _splits(self) -> bool:
        """Return whether gates and factors are stored separately, before their product."""
        hooked = (name for _, name, _ in self._hooks)
        adapted = (name for _, name in self.sites)
        return any(name in GATES for name in (*hooked, *adapted))

    def _program_for(self, angles: Sequence[Angles], *, is_adapted: bool) -> Program:
        """Return the program for the current pool and the current grouping of layers by angles."""
        paged = [layer.paged for layer in self.layers]
        first_of: dict[int, int] = {}
        kinds = [first_of.setdefault(id(cosine), len(first_of)) for cosine, _ in angles]
        key = (*map(id, paged), *kinds)
        program = self._programs.get(is_adapted)
        if program is None or program.key != key:
            sites = self.sites if is_adapted else None
            adds_ranks = self.ranks is not None
            writer = ProgramWriter(self._hooks.keys(), sites, adds_ranks=adds_ranks)
            for layer, settings, kind, (cosine, _) in zip(
                self.layers, self.settings, kinds, angles, strict=True
            ):
                writer.add_layer(layer, settings, kind, cosine)
            first_layers = [kinds.index(kind) for kind in range(len(first_of))]
            is_bf16 = self.dtype == torch.bfloat16
            program = Program(key, paged, first_layers, writer, is_bf16)
            self._programs[is_adapted] = program
        return program


def _backend_of(layer: PagedLayer) -> NativeBackend:
    assert isinstance(layer.backend, NativeBackend)
    return layer.backend


def pointers(addresses: list[int]) -> Any:
    """Return an array of addresses."""
    return (ctypes.c_void_p * len(addresses))(*addresses)


def replace_forwards(modules: Sequence[nn.Module], stack: Stack) -> None:
    """Make the last layer's module compute all layers, and the others pass their input on."""
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
    """Make each module compute its own layer again."""
    for module in modules:
        module.__dict__.pop("forward", None)


def _hooked_projections(layer: DecoderLayer) -> tuple[Projection, ...]:
    """Return the projections of a layer that can have hooks; experts' projections cannot."""
    without_mlp = (Projection.QUERY, Projection.KEY, Projection.VALUE, Projection.OUT)
    return without_mlp if isinstance(layer.mlp, FusedExperts) else tuple(Projection)
