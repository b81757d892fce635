"""Compares a coded KV cache with a plain one, once, after a model has been loaded.

Except for rounding, both must give the same logits if the plain cache holds the values that the
codes represent.
"""

from dataclasses import replace

import torch

from worker_proc.attention.interface import AttentionBackend, PagedLayer, Rows, Scoring
from worker_proc.calibration.self_check import (
    compute_stepwise,
    max_error,
    median_error,
    num_blocks_needed,
)
from worker_proc.errors import UnsupportedModel
from worker_proc.forward import attach_cache
from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_format import KVFormat, round_rows
from worker_proc.kv.kv_groups import KVLayout, LayerSpec
from worker_proc.kv.kv_tensors import Shapes
from worker_proc.loading.loaded_model import LoadedModel


class RoundedRows:
    """Attention by another backend, over keys and values rounded like codes."""

    def __init__(self, backend: AttentionBackend, format: KVFormat) -> None:
        self.name = backend.name
        self.depends_on_batch = backend.depends_on_batch
        self._backend = backend
        self._format = format

    def pool_shapes(self, spec: LayerSpec, num_blocks: int) -> Shapes:
        return self._backend.pool_shapes(spec, num_blocks)

    def begin_step(self, inputs: StepInputs) -> None:
        self._backend.begin_step(inputs)

    def attend(self, layer: PagedLayer, rows: Rows, scoring: Scoring) -> torch.Tensor:
        key, value = (round_rows(each, self._format) for each in (rows.key, rows.value))
        return self._backend.attend(layer, Rows(rows.query, key, value), scoring)


def check_codes(
    loaded: LoadedModel, plain: AttentionBackend, coded: AttentionBackend, layout: KVLayout
) -> list[torch.Tensor]:
    """Attach a coded cache and return logits computed with it: the rows of `check_forward`.

    The modules compute the layers. `plain` is the backend of a plain cache; `layout` is that of the
    coded one.
    """
    num_blocks = num_blocks_needed(layout)
    rounded, plain_layout = RoundedRows(plain, layout.format), as_plain(layout)
    attach_cache(loaded, rounded, plain_layout, num_blocks)
    expected = compute_stepwise(loaded, rounded, plain_layout)
    attach_cache(loaded, coded, layout, num_blocks)
    found = compute_stepwise(loaded, coded, layout)
    difference = median_error(found, expected)
    if not difference <= max_error(loaded.dtype):
        raise UnsupportedModel(
            f"{loaded.model.config.model_type}: its logits with kv_cache_dtype"
            f" {layout.format.config_name} differ from those over the keys and values that the"
            f" codes stand for (relative error {difference:.3g})"
        )
    return found


def as_plain(layout: KVLayout) -> KVLayout:
    """Return the same layout with keys and values in the model's dtype."""
    return replace(layout, format=KVFormat.PLAIN)
