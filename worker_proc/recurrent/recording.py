"""Records the states of recurrent modules while a model runs on the meta device."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from worker_proc.errors import UnsupportedModel
from worker_proc.recurrent.cache_argument import CACHE
from worker_proc.recurrent.functions import OPERATIONS, forward_with, is_recurrent
from worker_proc.recurrent.griffin import griffin_spec, is_griffin
from worker_proc.recurrent.lightning import is_lightning, lightning_spec
from worker_proc.recurrent.rwkv import is_rwkv, rwkv_spec
from worker_proc.recurrent.stand_in_cache import StandInCache, describe_states, keeps_states
from worker_proc.recurrent.state_spec import RecurrentSpec, StateSpec


class _Recorder:
    """The forward of one module, which records its calls of the replaced functions."""

    def __init__(
        self, module: nn.Module, name: str, found: list[RecurrentSpec], *, is_float32: bool
    ) -> None:
        """`is_float32`: the module's weights and the rows they multiply are always float32."""
        self._name = name
        self._found = found
        self._is_float32 = is_float32
        self._states: list[StateSpec] = []
        functions = {function: partial(self._call, function) for function in OPERATIONS}
        self._forward = forward_with(module, functions)
        self._known = _spec_by_parts(module, name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, and add its states to the list."""
        self._states = []
        rows = args[0] if args else kwargs["hidden_states"]
        result = self._forward(*args, **kwargs)
        own = RecurrentSpec(self._name, rows.shape[-1], tuple(self._states))
        self._found.append(self._known or own)
        return result

    def _call(self, function: str, *args: Any, **kwargs: Any) -> Any:
        try:
            spec, result = OPERATIONS[function].describe(*args, **kwargs)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{self._name}: {error}") from error
        self._states.append(replace(spec, is_window=False) if self._is_float32 else spec)
        return result


class _CacheRecorder:
    """The forward of one module that keeps its states in a cache; records them."""

    def __init__(
        self, module: nn.Module, name: str, dtype: torch.dtype, found: list[RecurrentSpec]
    ) -> None:
        self._name = name
        self._dtype = dtype
        self._found = found
        self._forward = MethodType(type(module).forward, module)
        self._signature = inspect.signature(self._forward)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward, and add the states that it wrote."""
        bound = self._signature.bind(*args, **kwargs)
        cache = bound.arguments[CACHE] = StandInCache(None)
        result = self._forward(*bound.args, **bound.kwargs)
        try:
            states = describe_states(cache, self._dtype)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{self._name}: {error}") from error
        given = {
            name: one for name, one in bound.arguments.items() if isinstance(one, torch.Tensor)
        }
        first, *others = given
        rows = given[first]
        sizes = {
            name: given[name].shape[-1]
            for name in others
            if given[name].is_floating_point() and given[name].shape[:2] == rows.shape[:2]
        }
        self._found.append(RecurrentSpec(self._name, rows.shape[-1], states, sizes))
        return result


@contextmanager
def recorded_states(
    model: PreTrainedModel, on_used: Callable[[Any], None]
) -> Iterator[list[RecurrentSpec]]:
    """Yield a list of recurrent modules, which a forward fills in call order.

    Calls `on_used` with the parameters of each, since only the functions use some of them.
    """
    found: list[RecurrentSpec] = []
    modules = {
        name: module
        for name, module in model.named_modules()
        if is_recurrent(module) or _spec_by_parts(module, name) is not None
    }
    caching = _modules_with_cached_states(model)
    for name, module in modules.items():
        is_float32 = _stays_float32(model, module, name)
        recorder = _Recorder(module, name, found, is_float32=is_float32)
        module.__dict__["forward"] = recorder.forward
        on_used(module.parameters())
    for name, module in caching.items():
        caching_recorder = _CacheRecorder(module, name, model.dtype, found)
        module.__dict__["forward"] = caching_recorder.forward
    try:
        yield found
    finally:
        for module in (*modules.values(), *caching.values()):
            del module.__dict__["forward"]


def _stays_float32(model: PreTrainedModel, module: nn.Module, name: str) -> bool:
    """Return whether transformers keeps all weights of a module in float32."""
    kept = model._keep_in_fp32_modules_strict or ()
    names = [f"{name}.{own}" for own, _ in module.named_parameters()]
    return bool(names) and all(any(part in one for part in kept) for one in names)


def _modules_with_cached_states(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules that keep states without calling one of the functions."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        is_inner = any(name.startswith(f"{outer}.") for outer in found)
        if not is_inner and not is_recurrent(module) and keeps_states(module):
            found[name] = module
    return found


def _spec_by_parts(module: nn.Module, name: str) -> RecurrentSpec | None:
    """Return the states of a module that is recognized by its parts, or None."""
    if is_lightning(module):
        return lightning_spec(module, name)
    if is_rwkv(module):
        return rwkv_spec(module, name)
    return griffin_spec(module, name) if is_griffin(module) else None
