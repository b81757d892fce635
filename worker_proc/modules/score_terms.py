"""Proves modules whose scores have terms from rows, and packs the weights of these terms.

See attention/score_terms.py for the terms.

A module computes packed rows of three texts of different scales, in steps of several lengths, and
attends over a small pool by the kernel that will be used. It must agree with its own forward over
each text, in float32, at the first and the last positions. Windows and distances are shortened, so
that the texts exceed them. Recurrent modules inside a module are left out on both sides: they are
proven separately.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from worker_proc.attention.interface import (
    IMPLEMENTATION,
    AttentionBackend,
    PagedLayer,
    set_implementation,
)
from worker_proc.attention.native import NativeBackend, can_attend
from worker_proc.attention.probed_layer import NO_ROW_TERMS, ProbedLayer
from worker_proc.attention.score_terms import PRODUCT, distance_terms_of
from worker_proc.attention.sdpa import Rule, SdpaBackend
from worker_proc.errors import UnsupportedModel
from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.kv.kv_tensors import KVTensors
from worker_proc.loading.deferred_module import make_generator
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.row_positions import PackedPositions, PastTokens, counts_from_cache
from worker_proc.modules.packed_linear import can_pack, make_linear
from worker_proc.modules.trial_calls import Call, at_positions, in_float32, record_calls
from worker_proc.modules.trial_errors import TRIAL_SCALES, greatest, greatest_row_error
from worker_proc.modules.trial_texts import STEPS, compute_in_steps, descending_tables, steps_of
from worker_proc.native.kernels import NativeLibrary
from worker_proc.recurrent.cache_argument import CACHE

MAX_ERROR = 1e-4
"""The greatest error of a row, relative to its norm: sums have another order."""
MAX_REACH = 24
"""The greatest window or distance in a trial."""
_BLOCK_SIZE = 8
_CPU = torch.device("cpu")


@torch.inference_mode()
def prove_score_terms(
    loaded: LoadedModel, library: NativeLibrary | None, known: list[str] | None = None
) -> list[str]:
    """Return the names of the proven modules; call it before any of their parts are replaced.

    `known` is such a result of an earlier start; with it, nothing is tried. Raises UnsupportedModel
    if a module differs from its own forward.
    """
    layers = [layer for layer in loaded.layers if layer.row_terms != NO_ROW_TERMS]
    names = [layer.module_name for layer in layers]
    if not layers or known == names:
        return names
    num_tokens = min(sum(STEPS), loaded.model_len)
    calls = record_calls(loaded, [loaded.model.get_submodule(name) for name in names], num_tokens)
    for layer in layers:
        module = loaded.model.get_submodule(layer.module_name)
        error = _greatest_error(loaded, layer, module, calls[type(module)], library)
        if not error <= MAX_ERROR:
            raise UnsupportedModel(
                f"{layer.module_name} ({type(module).__name__}) with terms of rows in its scores"
                f" differs from its own forward (relative error {error:.3g})"
            )
    return names


def pack_distance_products(loaded: LoadedModel, library: NativeLibrary | None) -> None:
    """Pack the weights that convert queries' states to biases by distance."""
    if not can_pack(loaded.dtype, loaded.device, library):
        return
    for layer in loaded.layers:
        terms = distance_terms_of(loaded.model.get_submodule(layer.module_name))
        if terms is None:
            continue
        profiles = terms.profiles.detach()
        child = terms.child
        [name] = child._parameters
        # Its own forward, with which the model is compared, still reads the weight.
        del child._parameters[name]
        child.__dict__[name] = profiles
        child.__dict__[PRODUCT] = make_linear(profiles.t().contiguous(), None, library)


def _greatest_error(
    loaded: LoadedModel,
    layer: ProbedLayer,
    module: nn.Module,
    call: Call,
    library: NativeLibrary | None,
) -> float:
    """Return the greatest error of a row, at the first and the last positions."""
    inner = [
        spec.module_name.removeprefix(f"{layer.module_name}.")
        for spec in loaded.recurrent
        if spec.module_name.startswith(f"{layer.module_name}.")
    ]
    with in_float32(module) as copied:
        own = copied
    spec = layer.spec
    if spec.window is not None:
        spec = replace(spec, window=min(spec.window, MAX_REACH))
    if (terms := distance_terms_of(own)) is not None:
        terms.cut(MAX_REACH)
    [rows_name, *others] = [name for name in call if name.endswith("hidden_states")]
    num_tokens, size = call[rows_name].shape[1:]
    shape = len(TRIAL_SCALES), num_tokens, size
    rows = torch.randn(shape, generator=make_generator(1))
    rows *= torch.tensor(TRIAL_SCALES).view(-1, 1, 1)
    trial = _Trial(own, spec, call, (rows_name, *others), library)
    with _leaving_out(own, inner):
        shifts = sorted({0, loaded.model_len - num_tokens})
        return greatest(trial.error(rows, shift) for shift in shifts)


@contextmanager
def _leaving_out(module: nn.Module, names: Sequence[str]) -> Iterator[None]:
    """Make parts of a module return their input within the context."""
    parts = [module.get_submodule(name) for name in names]
    for part in parts:
        part.__dict__["forward"] = lambda rows, *_, **__: rows
    try:
        yield
    finally:
        for part in parts:
            del part.__dict__["forward"]


class _Trial(NamedTuple):
    """A copy of a module in float32, with its attention layer and call arguments."""

    module: nn.Module
    spec: LayerSpec
    call: Call
    names: Sequence[str]
    """Names of the arguments that are rows."""
    library: NativeLibrary | None

    def error(self, rows: torch.Tensor, shift: int) -> float:
        """Return the greatest error of texts `[num_texts, T, size]` that begin at `shift`."""
        before = cast(Any, self.module).config._attn_implementation
        set_implementation(self.module, "eager")
        try:
            expected = torch.cat([self._own(text.unsqueeze(0), shift) for text in rows])
            set_implementation(self.module, IMPLEMENTATION)
            found = self._computed_in_steps(rows, shift)
        finally:
            set_implementation(self.module, before)
        return greatest_row_error(found, expected)

    def _own(self, text: torch.Tensor, shift: int) -> torch.Tensor:
        num_tokens = text.shape[1]
        positions = torch.arange(num_tokens)
        distances = positions[:, None] - positions
        hidden = distances < 0
        if self.spec.window is not None:
            hidden |= distances >= self.spec.window
        mask = torch.zeros(1, 1, num_tokens, num_tokens).masked_fill_(
            hidden, torch.finfo(torch.float32).min
        )
        return self._called(text, positions, shift, mask, PastTokens(shift))

    def _computed_in_steps(self, rows: torch.Tensor, shift: int) -> torch.Tensor:
        num_texts, num_tokens, _ = rows.shape
        tables = descending_tables(num_texts, num_tokens, _BLOCK_SIZE)
        backend = self._backend()
        shapes = backend.pool_shapes(self.spec, 1 + sum(map(len, tables)))
        pools = KVTensors(*(torch.zeros(cast(tuple[int, ...], shape)) for shape in shapes))
        self.module.__dict__["paged_layer"] = PagedLayer(self.spec, pools, backend)

        def compute(packed: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
            backend.begin_step(inputs)
            cache = PackedPositions(inputs.position_ids + shift)
            return self._called(packed, inputs.position_ids[0], shift, None, cache)

        return compute_in_steps(rows, steps_of(num_tokens), tables, compute)

    def _backend(self) -> AttentionBackend:
        if self.library is not None and can_attend([self.spec], torch.float32, _CPU):
            windows = (self.spec.window,)
            return NativeBackend(self.library, _BLOCK_SIZE, torch.float32, [self.spec], windows)
        return SdpaBackend({Rule(0, self.spec.window)}, _BLOCK_SIZE, torch.float32, _CPU)

    def _called(
        self,
        rows: torch.Tensor,
        positions: torch.Tensor,
        shift: int,
        mask: torch.Tensor | None,
        cache: PackedPositions,
    ) -> torch.Tensor:
        num_tokens = self.call[self.names[0]].shape[1]
        given = at_positions(self.call, positions, num_tokens)
        # Arguments with rows of several kinds receive different rows.
        given |= {name: rows.roll(place, -1) for place, name in enumerate(self.names)}
        given |= {"attention_mask": mask, "position_ids": (positions + shift).unsqueeze(0)}
        given[CACHE] = cache if counts_from_cache(self.module) else None
        out: torch.Tensor = self.module(**given)[0]
        return out
