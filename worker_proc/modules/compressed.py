"""Makes modules with compressors attend over the paged cache, if they are proven.

Each module must reproduce the results of its own forward in transformers, on random rows of several
scales, with several texts that are computed together in steps of varying lengths. In this trial an
indexer chooses fewer entries than there are, so that its choice matters. Both forwards are computed
in float32, so that only the order of sums differs. That order may decide between two entries with
nearly the same score, so further rows are tried if some rows differ.
"""

import copy
import math
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
)
from worker_proc.attention.probed_layer import ProbedLayer
from worker_proc.errors import UnsupportedModel
from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_groups import LayerSpec, lay_out
from worker_proc.kv.kv_tensors import KVTensors
from worker_proc.loading.deferred_module import make_generator
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.modules.coded_weights import dequantized
from worker_proc.modules.trial_calls import Call, at_positions, record_calls
from worker_proc.modules.trial_errors import TRIAL_SCALES, greatest_row_error
from worker_proc.modules.trial_texts import compute_in_steps, descending_tables, steps_of
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary

MAX_ERROR = 1e-4
"""The greatest accepted error of a row, relative to its norm."""
NUM_TRIALS = 3
_BLOCK_SIZE = 16
_NUM_GROUPS = 3
_SPARE_TOKENS = 5


def is_compressed(specs: Collection[LayerSpec]) -> bool:
    """Return whether any layer attends over compressed entries."""
    return any(spec.compressed is not None for spec in specs)


def install_compressed(
    loaded: LoadedModel, library: NativeLibrary | None, known: list[str] | None = None
) -> list[str]:
    """Attach the kernel to a model's compressors, if it has any.

    Returns the names of the proven modules. `known` is such a result of an earlier start; with it,
    nothing is tried. Raises UnsupportedModel if a module differs from its own forward.
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
    """Return a module's greatest error in the best of several trials."""
    compressed = layer.spec.compressed
    assert compressed is not None
    needed = max(compressed.window, _NUM_GROUPS * compressed.ratio) + _SPARE_TOKENS
    num_tokens = min(needed, loaded.model_len)
    own = loaded.model.get_submodule(layer.module_name)
    first = loaded.model.get_submodule(loaded.layers[0].module_name)
    call = record_calls(loaded, [first], num_tokens)[type(first)]  # equal for all modules
    call.pop("hidden_states", None)
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
    """Return the size of a module's input rows, which its first projection takes."""
    return next(part.in_features for part in module.modules() if isinstance(part, nn.Linear))


class _Trial(NamedTuple):
    """A copy of a module in float32, with its attention layer and call arguments."""

    module: nn.Module
    spec: LayerSpec
    sinks: torch.Tensor | None
    library: NativeLibrary
    call: Call

    def error(self, rows: torch.Tensor) -> float:
        """Return the greatest error of texts `[num_texts, T, size]`, relative to a row's norm."""
        set_implementation(self.module, "eager")
        expected = torch.cat([self.module(text.unsqueeze(0), **self.call)[0] for text in rows])
        compression = compression_of(self.module)
        if compression is not None and not compression.parameters:
            compression.take_parameters()
        set_implementation(self.module, IMPLEMENTATION)
        return greatest_row_error(self._computed_in_steps(rows), expected)

    def _computed_in_steps(self, rows: torch.Tensor) -> torch.Tensor:
        num_texts, num_tokens, _ = rows.shape
        tables = descending_tables(num_texts, num_tokens, _BLOCK_SIZE)
        backend = CompressedBackend(self.library, _BLOCK_SIZE, torch.float32, [self.spec])
        layout = lay_out([self.spec], _BLOCK_SIZE, num_tokens, num_tokens, False)
        pool = torch.zeros(1 + sum(map(len, tables)), layout.block_numbers)
        layer = PagedLayer(
            self.spec,
            KVTensors(pool, pool),
            backend,
            sinks=self.sinks,
            compression=compression_of(self.module),
            place=layout.places[0],
        )
        self.module.__dict__["paged_layer"] = layer

        def compute(packed: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
            backend.begin_step(inputs)
            call = at_positions(self.call, inputs.position_ids[0], num_tokens)
            out: torch.Tensor = self.module(packed, **(call | {"attention_mask": None}))[0]
            return out

        return compute_in_steps(rows, steps_of(num_tokens), tables, compute)
