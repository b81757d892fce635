"""Lets modules with compressors attend over the paged cache, where that is proven.

Each module must give the results of its own forward in transformers, on random rows of several
scales, with texts that are computed together in steps of other lengths. An indexer chooses fewer
entries in this trial, so that it does choose. Both are computed in float32, so that only the order
of sums differs: of two entries with nearly the same score, another one may be chosen then, so other
rows are tried if some rows differ.
"""

import copy
import math
from array import array
from collections.abc import Collection
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from worker_proc.attention.compressed_backend import CompressedBackend
from worker_proc.attention.compression import compression_of
from worker_proc.attention.interface import (
    IMPLEMENTATION,
    PagedLayer,
    set_implementation,
    transformers_attention,
)
from worker_proc.attention.recorder import ProbedLayer
from worker_proc.errors import UnsupportedModel
from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_groups import LayerSpec, lay_out
from worker_proc.kv.kv_tensors import KVTensors
from worker_proc.loading.deferred_module import make_generator
from worker_proc.loading.loader import LoadedModel
from worker_proc.modules.coded_weights import dequantized
from worker_proc.modules.trial_errors import TRIAL_SCALES, greatest
from worker_proc.modules.trial_texts import STEPS, compute_in_steps
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary

MAX_ERROR = 1e-4
"""Of a row, relative to its length."""
NUM_TRIALS = 3
_BLOCK_SIZE = 16
_NUM_GROUPS = 3
_SPARE_TOKENS = 5
_Call = dict[str, Any]
"""The arguments of an attention module but its rows."""


class _Recorded(Exception):
    """Ends a forward whose arguments have been recorded."""


def is_compressed(specs: Collection[LayerSpec]) -> bool:
    """Return whether layers attend over compressed entries."""
    return any(spec.compressed is not None for spec in specs)


def install_compressed(
    loaded: LoadedModel, library: NativeLibrary | None, known: list[str] | None = None
) -> list[str]:
    """Let the kernel compute with the parameters of a model's compressors, if it has any.

    Returns the names of the modules that are proven. `known` is this result of an earlier start,
    with which nothing is tried. UnsupportedModel: a module differs from its own forward.
    """
    layers = loaded.layers if is_compressed([layer.spec for layer in loaded.layers]) else []
    if layers and (library is None or loaded.dtype not in NATIVE_DTYPES):
        dtype = str(loaded.dtype).removeprefix("torch.")
        raise UnsupportedModel(
            f"{loaded.model.config.model_type}: attention over compressed entries needs the"
            f" compiled kernels, which compute in float32 and bfloat16; the dtype is {dtype}"
        )
    names = [layer.module_name for layer in layers]
    if known is None and library is not None:
        for layer in layers:
            error = _least_error(loaded, layer, library)
            if not error <= MAX_ERROR:
                module = loaded.model.get_submodule(layer.module_name)
                raise UnsupportedModel(
                    f"{layer.module_name} ({type(module).__name__}) over compressed entries differs"
                    f" from its own forward (relative error {error:.3g})"
                )
    for name in names:
        compression = compression_of(loaded.model.get_submodule(name))
        if compression is not None:
            compression.take_parameters()
    return names


@torch.inference_mode()
def _least_error(loaded: LoadedModel, layer: ProbedLayer, library: NativeLibrary) -> float:
    """Return the least of the greatest errors of the trials of a module."""
    compressed = layer.spec.compressed
    assert compressed is not None
    least = max(compressed.window, _NUM_GROUPS * compressed.ratio) + _SPARE_TOKENS
    num_tokens = min(least, loaded.model_len)
    own = loaded.model.get_submodule(layer.module_name)
    call = _record_call(loaded, num_tokens)
    with dequantized(own):
        module = copy.deepcopy(own).float()
    num_entries = num_tokens // compressed.ratio if compressed.ratio else 0
    num_chosen = max(min(compressed.num_chosen, num_entries // _NUM_GROUPS), 1)
    if compressed.num_chosen:
        compressed = replace(compressed, num_chosen=num_chosen)
        cast(Any, module).compressor.indexer.index_topk = num_chosen
    sinks = None
    if layer.sinks is not None:
        sinks = module.get_parameter(layer.sinks.removeprefix(f"{layer.module_name}."))
    trial = _Trial(module, replace(layer.spec, compressed=compressed), sinks, library, call)
    size = _input_size(module)
    found = math.inf
    for seed in range(NUM_TRIALS):
        shape = len(TRIAL_SCALES), num_tokens, size
        rows = torch.randn(shape, generator=make_generator(seed + 1))
        rows *= torch.tensor(TRIAL_SCALES).view(-1, 1, 1)
        found = min(found, trial.error(rows))
        if found <= MAX_ERROR:
            break
    return found


def _input_size(module: nn.Module) -> int:
    """Return the size of a module's rows: that of what its first projection takes."""
    return next(part.in_features for part in module.modules() if isinstance(part, nn.Linear))


def _record_call(loaded: LoadedModel, num_tokens: int) -> _Call:
    """Return the arguments of the first module in a text's own forward: all get the same."""
    first = loaded.model.get_submodule(loaded.layers[0].module_name)
    calls: list[_Call] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append({key: _as_float(value) for key, value in kwargs.items()})
        calls[-1].pop("hidden_states", None)
        raise _Recorded

    positions = torch.arange(num_tokens).unsqueeze(0)
    handle = first.register_forward_pre_hook(record, with_kwargs=True)
    try:
        with transformers_attention(loaded.model):
            tokens = positions % loaded.vocab_size
            loaded.model(input_ids=tokens, position_ids=positions, use_cache=False)
    except _Recorded:
        pass
    finally:
        handle.remove()
    return calls[0]


def _as_float(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_as_float, value))
    if isinstance(value, dict):
        return {key: _as_float(one) for key, one in value.items()}
    is_real = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.float() if is_real else value


class _Trial(NamedTuple):
    """A copy of a module in float32, and how it attends."""

    module: nn.Module
    spec: LayerSpec
    sinks: torch.Tensor | None
    library: NativeLibrary
    call: _Call

    def error(self, rows: torch.Tensor) -> float:
        """Return the greatest error of texts `[num_texts, T, size]`, relative to a row's length."""
        set_implementation(self.module, "eager")
        expected = torch.cat([self.module(text.unsqueeze(0), **self.call)[0] for text in rows])
        compression = compression_of(self.module)
        if compression is not None and not compression.parameters:
            compression.take_parameters()
        set_implementation(self.module, IMPLEMENTATION)
        found = self._computed_in_steps(rows)
        lengths = expected.norm(dim=-1).clamp_min(1e-30)
        return greatest([float(((found - expected).norm(dim=-1) / lengths).max())])

    def _computed_in_steps(self, rows: torch.Tensor) -> torch.Tensor:
        num_texts, num_tokens, _ = rows.shape
        per_text = -(-num_tokens // _BLOCK_SIZE)
        backend = CompressedBackend(self.library, _BLOCK_SIZE, torch.float32, [self.spec])
        layout = lay_out([self.spec], _BLOCK_SIZE, num_tokens, num_tokens, False)
        pool = torch.zeros(1 + num_texts * per_text, layout.block_numbers)
        layer = PagedLayer(
            self.spec,
            KVTensors(pool, pool),
            backend,
            sinks=self.sinks,
            compression=compression_of(self.module),
            place=layout.places[0],
        )
        self.module.__dict__["paged_layer"] = layer
        # The blocks of a text are in descending order.
        tables = [
            array("i", range(last, last - per_text, -1))
            for last in range(per_text, 1 + num_texts * per_text, per_text)
        ]

        def compute(packed: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
            backend.begin_step(inputs)
            call = _at(self.call, inputs.position_ids[0], num_tokens)
            out: torch.Tensor = self.module(packed, **(call | {"attention_mask": None}))[0]
            return out

        return compute_in_steps(rows, _steps_of(num_tokens), tables, compute)


def _steps_of(num_tokens: int) -> list[int]:
    """Return the first steps of a trial as far as the tokens suffice, and one for the rest."""
    steps, left = [], num_tokens
    for count in (*STEPS, num_tokens):
        if left:
            steps.append(min(count, left))
            left -= steps[-1]
    return steps


def _at(value: Any, positions: torch.Tensor, num_tokens: int) -> Any:
    """Return what is given of some positions, of which `[1, T, ...]` are given."""
    if isinstance(value, tuple):
        return tuple(_at(one, positions, num_tokens) for one in value)
    if isinstance(value, dict):
        return {key: _at(one, positions, num_tokens) for key, one in value.items()}
    if isinstance(value, torch.Tensor) and value.shape[:2] == (1, num_tokens):
        return value.index_select(1, positions)
    return value
