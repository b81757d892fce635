"""Proves, before modules are divided, that the ranks' outputs add up to the whole module's."""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig

from worker_proc.attention.interface import transformers_attention
from worker_proc.calibration.self_check import check_texts
from worker_proc.loading.loaded_model import LoadedModel
from worker_proc.parallel.division.module_division import Division
from worker_proc.parallel.division.rank_norm import RankNorm
from worker_proc.parallel.share import Share, refuse
from worker_proc.recurrent.layers import own_forwards

_MAX_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.04}
"""The greatest error of a module's rows, relative to their norm: only sums have another order. The
greatest measured errors are 8e-7 and 0.009."""


class _Call(NamedTuple):
    """The arguments of a module, and its output rows."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: torch.Tensor


class _AllRecorded(Exception):
    """Ends a forward early: later modules are not computed, and their codes not dequantized."""


@torch.inference_mode()
def prove(loaded: LoadedModel, divisions: Sequence[Division], num_ranks: int) -> None:
    """Compare the sum of the ranks' outputs with the whole module's, for one module of each shape.

    Raises UnsupportedModel if they differ.
    """
    shapes = {_shape(part): part for part in reversed(divisions)}
    model = loaded.model
    with transformers_attention(model), own_forwards(model), _plain_experts(model):
        names = [part.module_name for part in shapes.values()]
        with _recorded(model, names, ends_forward=True) as calls:
            text = check_texts(loaded.vocab_size)[0]
            with suppress(_AllRecorded):
                model(input_ids=torch.tensor([text]), use_cache=False)
        for part in shapes.values():
            name = part.module_name
            if name not in calls:
                raise refuse(Share(0, num_ranks), f"{name} is not computed in a step")
            difference = _difference(part, model.get_submodule(name), calls[name], num_ranks)
            if not difference <= _MAX_ERROR[loaded.dtype]:
                reason = f"the parts of {name} do not add up to it"
                raise refuse(Share(0, num_ranks), f"{reason} (relative error {difference:.3g})")


def _difference(part: Division, whole: nn.Module, call: _Call, num_ranks: int) -> float:
    """Return the relative error of the sum of all ranks' outputs in a call.

    Raises UnsupportedModel if a rank's part cannot be computed.
    """
    expected = (_output(whole, call, part.summed) if part.summed else call.output).float()
    modules = [copy.deepcopy(whole) for _ in range(num_ranks)]
    for rank, module in enumerate(modules):
        part.apply(module, Share(rank, num_ranks))
    try:
        for name in part.summed_within:
            _add_up_outputs(name, modules, call)
        for name in (*part.norms, *part.gated_norms):
            norms = [getattr(module, name) for module in modules]
            if norms[0].is_shared:
                _add_up_squares(norms, modules, call)
        outputs = [_output(module, call, part.summed).float() for module in modules]
        difference = torch.stack(outputs).sum(0) - expected
    except RuntimeError as error:
        reason = f"a part of {part.module_name} cannot be computed ({error})"
        raise refuse(Share(0, num_ranks), reason) from error
    return float(difference.norm() / expected.norm().clamp_min(1e-6))


def _add_up_outputs(child: str, modules: Sequence[nn.Module], call: _Call) -> None:
    """Make a part of all ranks' modules return the sums that the ranks would exchange in a call."""
    outputs = [_output(module, call, child) for module in modules]
    total = torch.stack(outputs).float().sum(0).to(outputs[0].dtype)
    for module in modules:
        module.get_submodule(child).register_forward_hook(lambda *_: total)


def _add_up_squares(norms: Sequence[RankNorm], modules: Sequence[nn.Module], call: _Call) -> None:
    """Give the norms of all ranks' modules the sums that the ranks would exchange in a call."""
    sums: list[torch.Tensor] = []
    for norm, module in zip(norms, modules, strict=True):
        norm.add_up = lambda rows: sums.append(rows.clone())
        module(*call.args, **call.kwargs)
    total = torch.stack(sums).sum(0)

    def give_total(rows: torch.Tensor) -> None:
        rows.copy_(total)

    for norm in norms:
        norm.add_up = give_total


def _output(module: nn.Module, call: _Call, child: str) -> torch.Tensor:
    """Return the output rows of a module, or of its part `child`, in a call of the module."""
    if not child:
        return _first(module(*call.args, **call.kwargs))
    with _recorded(module, [child]) as calls:
        module(*call.args, **call.kwargs)
    return calls[child].output


def _shape(part: Division) -> str:
    """Return everything but the name; of all divisions with the same text one is tried."""
    return repr(replace(part, module_name=""))


@contextmanager
def _recorded(
    model: nn.Module, names: Sequence[str], *, ends_forward: bool = False
) -> Iterator[dict[str, _Call]]:
    """Record the last call of each module.

    With `ends_forward`, `_AllRecorded` is raised once all of them have been called.
    """
    calls: dict[str, _Call] = {}

    def record(name: str) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            calls[name] = _Call(args, kwargs, _first(output))
            if ends_forward and calls.keys() >= set(names):
                raise _AllRecorded

        return hook

    handles = [
        model.get_submodule(name).register_forward_hook(record(name), with_kwargs=True)
        for name in names
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _plain_experts(model: nn.Module) -> Iterator[None]:
    """Make experts compute with their own code: torch's grouped products need rows of 16 bytes."""
    found = {id(config): config for config in map(_config_of, model.modules())}
    before = [(one, one._experts_implementation) for one in found.values() if one is not None]
    for config, _ in before:
        config._experts_implementation_internal = "eager"
    try:
        yield
    finally:
        for config, experts in before:
            config._experts_implementation_internal = experts


def _config_of(module: nn.Module) -> PretrainedConfig | None:
    config = getattr(module, "config", None)
    return config if isinstance(config, PretrainedConfig) else None


def _first(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found
