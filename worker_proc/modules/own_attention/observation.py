"""Observes the windows, biases and KV heads of attention modules that have their weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from worker_proc.attention.stand_ins import OwnCache, OwnCall, OwnMask
from worker_proc.errors import UnsupportedModel
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.loading.deferred_module import make_generator
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.modules.own_attention.biases import Biases, observed_biases
from worker_proc.modules.own_attention.inputs import NUM_TOKENS, record_inputs
from worker_proc.modules.trial_calls import in_float32


@dataclass(frozen=True, slots=True)
class OwnLayer:
    """Observed and proven properties of an attention module."""

    spec: LayerSpec
    biases_of: int | None = None
    """The first layer with the same biases; None: no biases."""


def observe(
    loaded: LoadedModel, modules: list[nn.Module], known: Sequence[OwnLayer] | None
) -> tuple[list[OwnLayer], dict[int, Biases]]:
    """Return the observed layers, and each distinct bias table by its first layer.

    If layers are known, only the modules that own a bias table are called.
    """
    length = loaded.model_len
    num_rows = min(NUM_TOKENS, length)
    calls: list[OwnCall] = []

    def attend(call: OwnCall) -> torch.Tensor:
        calls.append(call)
        return call.query.new_zeros(*call.query.shape[:2], call.value.shape[2])

    cache = OwnCache(attend, length - num_rows)
    inputs = record_inputs(loaded, modules[0], cache, length - num_rows, num_rows)
    rows = inputs.random_rows(loaded.device)
    layers: list[OwnLayer] = []
    tables: dict[int, Biases] = {}
    for number, (probed, module) in enumerate(zip(loaded.layers, modules, strict=True)):
        if known is not None and known[number].biases_of != number:
            layers.append(known[number])
            continue
        with in_float32(module) as own:
            inputs.call(own, rows, cache)
            call = calls.pop()
            # With other weights, since heads of equal weights may differ once an adapter is added.
            for parameter in own.parameters():
                parameter.copy_(_like(parameter))
            inputs.call(own, rows, cache)
            num_kv_heads = _num_kv_heads(calls.pop())
        table = observed_biases(call, length)
        biases_of = None
        if table is not None:
            same = (first for first, other in tables.items() if table.is_same(other))
            biases_of = next(same, number)
            tables.setdefault(biases_of, table)
        spec = replace(
            probed.spec,
            num_kv_heads=num_kv_heads,
            window=_window(probed.module_name, call, length) or probed.spec.window,
        )
        layers.append(OwnLayer(spec, biases_of))
    return layers, {first: table.padded() for first, table in tables.items()}


def _num_kv_heads(call: OwnCall) -> int:
    """Return the number of distinct key and value heads; the others are copies."""
    heads = call.key.shape[1]
    for number in range(1, heads):
        if heads % number:
            continue
        groups = [rows.unflatten(1, (number, -1)) for rows in (call.key, call.value)]
        if all(torch.equal(group, group[:, :, :1].expand_as(group)) for group in groups):
            return number
    return heads


def _window(name: str, call: OwnCall, length: int) -> int | None:
    """Return the window of a module's own masks; None: they show all positions."""
    own = [mask for mask in call.terms.masks if not isinstance(mask, OwnMask)]
    if not own:
        return None
    num_rows, device = len(call.query), own[0].device
    seen = torch.ones(num_rows, length, dtype=torch.bool, device=device)
    for mask in own:
        seen &= mask.reshape(-1, *mask.shape[-2:])[0]
    rows = torch.arange(length - num_rows, length, device=device)[:, None]
    keys = torch.arange(length, device=device)
    window = int(seen[-1].sum())
    if not torch.equal(seen, (keys <= rows) & (keys > rows - window)):
        raise UnsupportedModel(f"{name} has a mask of its own that is not a window")
    return None if window == length else window


def _like(parameter: torch.Tensor) -> torch.Tensor:
    """Return random values for a parameter, scaled so that rows keep about their magnitude."""
    values = torch.randn(parameter.shape, generator=make_generator(2))
    return values.to(parameter.device) / math.sqrt(max(parameter.shape[-1], 1))
