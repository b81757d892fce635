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
from worker_proc.decoder.adapter_sites import Projection
from worker_proc.decoder.buffers import Buffers
from worker_proc.decoder.layers import DecoderLayer, LayerSettings, read_layer
from worker_proc.decoder.program import GATES, Program, ProgramWriter
from worker_proc.loading.layer_executor import Angles, Stack
from worker_proc.loading.ranks import Ranks
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
        self._rows: StepRows | None = None
        self.sites: Mapping[tuple[int, Projection], tuple[int, Site]] = {}
        """The numbered sites of projections that take adapters, by layer."""
        self.ranks: Ranks | None = None
        """The ranks that have the other parts of the layers."""
        self._clear()

    def step_addresses(self) -> Any:
        """Return the addresses of the current step, for each KV group."""
        steps = _backend_of(self.layers[0].paged).steps
        return pointers([ctypes.addressof(step) for step in steps])

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
        self.execute(program.args, run)
        return hidden[:, : self._hidden_size].clone().unsqueeze(0)

    def _clear(self) -> None:
        """Drop the program, and the memory of its buffers."""
        self.buffers = Buffers(self.layers, self.dtype, splits=self._splits())
        self._programs: dict[bool, Program] = {}
        """The program with adapters and the program without."""

    def _splits(self) -> bool:
        """Return whether gates and factors are stored separately, before their product."""
        return any(name in GATES for _, name in self.sites)

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
            writer = ProgramWriter(sites, adds_ranks=adds_ranks)
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
