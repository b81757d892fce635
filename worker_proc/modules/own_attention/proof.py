"""Compares attention modules over the paged cache with their own forward in transformers."""

import math
from typing import NamedTuple

import torch
from torch import nn
from transformers import DynamicCache

from worker_proc.attention.interface import transformers_attention
from worker_proc.attention.stand_ins import OwnCache, OwnCall
from worker_proc.errors import UnsupportedModel
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.loading.deferred_module import make_generator
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.modules.own_attention.biases import Biases
from worker_proc.modules.own_attention.inputs import NUM_TOKENS, Inputs, record_inputs
from worker_proc.modules.own_attention.observation import OwnLayer
from worker_proc.modules.trial_calls import in_float32
from worker_proc.modules.trial_errors import TRIAL_SCALES, greatest, greatest_row_error

MAX_PROOF_LEN = 2048
"""Maximum number of key positions in a proof."""
MAX_ERROR = 1e-4
"""Greatest error of a row, relative to its norm; larger rows lead to scores of hundreds."""


def prove(
    loaded: LoadedModel,
    modules: list[nn.Module],
    layers: list[OwnLayer],
    tables: dict[int, Biases],
) -> None:
    """Raise UnsupportedModel unless all modules reproduce the results of their own forward."""
    length = min(loaded.model_len, MAX_PROOF_LEN)
    num_rows = min(NUM_TOKENS, length)
    for num_past in sorted({0, length - num_rows}):
        ours = record_inputs(loaded, modules[0], OwnCache(_never, num_past), num_past, num_rows)
        spec = loaded.layers[0].spec
        with transformers_attention(loaded.model):
            cache = _filled_cache(0, *(_zeros(spec, num_past, dim) for dim in spec.stored_dims))
            theirs = record_inputs(loaded, modules[0], cache, num_past, num_rows)
        for number, (probed, module) in enumerate(zip(loaded.layers, modules, strict=True)):
            layer = layers[number]
            table = None if layer.biases_of is None else tables[layer.biases_of]
            trial = _Trial(number, probed.spec, layer.spec, table, num_past)
            with in_float32(module) as own:
                error = trial.error(loaded.model, own, ours, theirs)
            if not error <= MAX_ERROR:
                raise UnsupportedModel(
                    f"{probed.module_name} ({type(module).__name__}) differs from its own forward"
                    f" (relative error {error:.3g})"
                )


class _Trial(NamedTuple):
    """A trial of one layer with a number of past tokens."""

    number: int
    stored: LayerSpec  # with the heads that the module stores
    spec: LayerSpec
    biases: Biases | None
    num_past: int

    def error(self, model: nn.Module, module: nn.Module, ours: Inputs, theirs: Inputs) -> float:
        """Return the greatest error of a row at any scale, relative to its norm."""
        generator = make_generator(1)
        device = next(module.parameters()).device
        heads = self.spec.num_kv_heads
        past = [
            torch.randn(self.num_past, heads, dim, generator=generator).to(device)
            for dim in self.spec.stored_dims
        ]
        repeats = self.stored.num_kv_heads // heads
        in_cache = [
            rows.repeat_interleave(repeats, dim=1).transpose(0, 1).unsqueeze(0) for rows in past
        ]
        attend = _Attention(self, past).attend
        errors = []
        for scale in TRIAL_SCALES:
            rows = ours.random_rows(device) * scale
            with transformers_attention(model):
                cache = _filled_cache(self.number, *in_cache)
                expected = theirs.call(module, rows, cache)
            found = ours.call(module, rows, OwnCache(attend, self.num_past))
            if expected.shape != found.shape:
                return math.inf
            errors.append(greatest_row_error(found, expected))
        return greatest(errors)


class _Attention(NamedTuple):
    """Attention in PyTorch, equivalent to attention over the paged cache."""

    trial: _Trial
    past: list[torch.Tensor]  # keys and values, [num_past, num_kv_heads, dim]

    def attend(self, call: OwnCall) -> torch.Tensor:
        """Return `[T, num_heads, value_head_dim]`."""
        spec = self.trial.spec
        repeats = call.key.shape[1] // spec.num_kv_heads
        key, value = (
            torch.cat([past, rows[:, ::repeats]]).repeat_interleave(
                spec.num_heads // spec.num_kv_heads, dim=1
            )
            for past, rows in zip(self.past, (call.key, call.value), strict=True)
        )
        scores = torch.einsum("qhd,khd->hqk", call.query, key) * call.terms.scale
        keys = torch.arange(len(key), device=key.device)
        rows = keys[self.trial.num_past :, None]
        if self.trial.biases is not None:
            scores += self.trial.biases.of_rows(rows, keys)
        is_hidden = keys > rows
        if spec.window is not None:
            is_hidden |= keys <= rows - spec.window
        weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khd->qhd", weights, value)


def _never(call: OwnCall) -> torch.Tensor:
    raise AssertionError("a forward is recorded, and ends before it attends")


def _filled_cache(number: int, key: torch.Tensor, value: torch.Tensor) -> DynamicCache:
    """Return a cache of transformers with `[1, num_kv_heads, T, dim]` in one layer."""
    cache = DynamicCache()
    cache.update(key, value, number)
    return cache


def _zeros(spec: LayerSpec, num_past: int, dim: int) -> torch.Tensor:
    return torch.zeros(1, spec.num_kv_heads, num_past, dim)
