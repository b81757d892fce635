"""Finds the linear layers that can take adapters, and makes modules add the adapters' products.

The layers are found before modules are fused and packed, since fusing merges several layers into
one module.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from worker_proc.adapters.rows import StepRows
from worker_proc.adapters.sites import MatrixPart, OtherStages, Sites, whole_site
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.loading.output_layer import output_layer
from worker_proc.modules.mlp import FusedMLP
from worker_proc.modules.packed_linear import PackedLinear

Forward = Callable[[torch.Tensor], torch.Tensor]


def find_sites(
    loaded: LoadedModel,
    parts: Mapping[str, MatrixPart] | None = None,
    others: OtherStages | None = None,
) -> Sites:
    """Find the linear layers of a model, before any module is replaced.

    Tied layers have no sites, because one module computes them. `parts` is this rank's share of
    each layer that is divided among ranks, by name. `others` describes the other stages of a model
    in pipeline stages.
    """
    parts = parts or {}
    head = output_layer(loaded.model)
    num_uses = Counter(
        id(module.weight)
        for module in loaded.model.modules()
        if type(module) in (nn.Linear, Conv1D)
    )
    widths = {}
    for layer in loaded.layers:
        spec = layer.spec
        widths[f"{layer.module_name}.qkv_proj"] = (
            spec.num_heads * spec.head_dim,
            spec.num_kv_heads * spec.head_dim,
            spec.num_kv_heads * spec.value_head_dim,
        )
    sites = []
    for name, module in loaded.model.named_modules():
        if type(module) not in (nn.Linear, Conv1D) or module is head:
            continue
        weight = cast(nn.Linear, module).weight
        if weight.is_meta or num_uses[id(weight)] > 1:
            continue
        num_inputs, num_outputs = weight.shape if type(module) is Conv1D else weight.shape[::-1]
        first = 0
        part = parts.get(name, MatrixPart())
        spans = part.outputs
        own = [span.num_own for span in spans] or _parts(name, num_outputs, widths)
        for number, width in enumerate(own):
            site = whole_site(name, num_inputs, first, width)
            inputs = part.inputs or site.inputs
            outputs = spans[number] if spans else site.outputs
            sites.append(site._replace(inputs=inputs, outputs=outputs))
            first += width
    return Sites(sites, others)


def _parts(name: str, num_outputs: int, widths: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """Return the number of outputs of each projection in a linear layer."""
    if sum(widths.get(name, ())) == num_outputs:
        return widths[name]
    if name.endswith(".gate_up_proj") and num_outputs % 2 == 0:
        return num_outputs // 2, num_outputs // 2
    return (num_outputs,)


def adapt_modules(model: nn.Module, sites: Sites, rows: StepRows) -> set[int]:
    """Make modules add adapter products in steps with adapters; return the sites they cover.

    In other steps, and at sites that are not allowed, the modules compute as before.
    """
    adapted: set[int] = set()
    for module, numbers in _modules_with_sites(model, sites):
        if isinstance(module, FusedMLP):
            module.__dict__["forward"] = _adapted_mlp(module, numbers, sites, rows)
        else:
            module.__dict__["forward"] = _adapted_linear(module, numbers, sites, rows)
        adapted.update(numbers)
    return adapted


def _adapted_linear(
    module: PackedLinear, numbers: list[int], sites: Sites, rows: StepRows
) -> Forward:
    plain = type(module).forward.__get__(module)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = plain(hidden)
        if rows.args is not None:
            inputs = hidden.reshape(-1, module.in_features)
            outputs = out.view(-1, module.out_features)
            for number in sites.allowed.intersection(numbers):
                site = sites.all[number]
                part = outputs[:, site.first_output : site.first_output + site.num_outputs]
                rows.add_products(number, site, inputs, part)
        return out

    return forward


def _adapted_mlp(module: FusedMLP, numbers: list[int], sites: Sites, rows: StepRows) -> Forward:
    plain = type(module).forward.__get__(module)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        if rows.args is None:
            out: torch.Tensor = plain(hidden)
            return out
        inputs = hidden.reshape(-1, hidden.shape[-1])
        gates, factors = module.split(inputs)
        for number, part in zip(numbers, (gates, factors), strict=True):
            if number not in sites.allowed:
                continue
            rows.add_products(number, sites.all[number], inputs, part)
        return module.join(gates, factors, hidden.shape[:-1])

    return forward


def _modules_with_sites(
    model: nn.Module, sites: Sites
) -> Iterator[tuple[PackedLinear | FusedMLP, list[int]]]:
    """Yield each module that computes sites of the model, after fusing and packing.

    A fused MLP has the sites of its gates and of its factors.
    """
    modules = dict(model.named_modules())
    for name, numbers in sites.of_module.items():
        module = modules.get(name)
        if isinstance(module, PackedLinear):
            yield module, numbers
    for name, module in modules.items():
        if isinstance(module, FusedMLP):
            halves = [
                sites.of_module.get(f"{name}.{part}", []) for part in ("gate_proj", "up_proj")
            ]
            numbers = sites.of_module.get(f"{name}.gate_up_proj") or halves[0] + halves[1]
            if len(numbers) == 2:
                yield module, numbers
