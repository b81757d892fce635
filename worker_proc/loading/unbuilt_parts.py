"""Parts of a model that are not built: text does not reach them, or their library is missing."""

import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig, PreTrainedModel, modeling_utils

from worker_proc.attention.probe import is_within
from worker_proc.errors import UnsupportedModel
from worker_proc.loading.pooling_model import POOLER

_CONVERSIONS = "get_model_conversion_mapping"
"""The function of transformers that returns how names of weights are converted."""


class MissingTower(nn.Module):
    """Replaces a tower whose library is not installed."""

    def __init__(self, problem: str) -> None:
        super().__init__()
        self._problem = problem
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        """It has a parameter, like a tower, which text does not reach."""

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Raise UnsupportedModel: text has reached the tower."""
        raise UnsupportedModel(self._problem)


class LeftOut(nn.Module):
    """Replaces a module that text does not reach; models may read its device.

    It has the names of that module's parts, but no values. A conversion that produces one of its
    weights together with a used one (ERNIE's experts for images and for text) can assign it, and
    transformers reports the weight as unexpected.
    """

    device = torch.device("meta")

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        self._is_hf_initialized = True  # transformers initializes modules without this mark
        for name, _ in replaced.named_parameters(recurse=False):
            self.register_parameter(name, None)
        computed = replaced._non_persistent_buffers_set  # models may compute those of all layers
        for name, buffer in replaced.named_buffers(recurse=False):
            kept = buffer if name in computed else None
            self.register_buffer(name, kept, persistent=name not in computed)
        for name, child in replaced.named_children():
            self.add_module(name, LeftOut(child))

    def forward(self, *args: object, **kwargs: object) -> Any:
        """Raise UnsupportedModel: text has reached the module."""
        raise UnsupportedModel("text reaches a module that was not built")


@contextmanager
def building_without_libraries() -> Iterator[None]:
    """Make transformers build models whose towers need libraries that are not installed (timm).

    Parts of a model are built by `AutoModel.from_config`.
    """
    from_config = AutoModel.from_config

    def build(cls: type[Any], /, config: PretrainedConfig, **options: Any) -> Any:
        try:
            return from_config(config, **options)
        except ImportError as error:
            reason = str(error).strip().partition("\n")[0]
            return MissingTower(f"{config.model_type}: {reason}")

    AutoModel.from_config = classmethod(build)
    try:
        yield
    finally:
        del AutoModel.from_config  # its base class defines it


def without_libraries(build: Callable[[], Any]) -> Any:
    """Return the result of `build`, replacing towers whose libraries are not installed.

    Inkling's tower, which needs scipy, is an example. Each such tower is found by a failing
    attempt.
    """
    replaced: dict[type[PreTrainedModel], Any] = {}
    with building_without_libraries():
        try:
            while True:
                try:
                    return build()
                except ImportError as error:
                    tower = _tower_of(error)
                    if tower is None or tower in replaced:
                        raise
                    reason = f"{tower.__name__}: {error}"
                    replaced[tower] = lambda *_, reason=reason, **__: MissingTower(reason)
                    setattr(sys.modules[tower.__module__], tower.__name__, replaced[tower])
        finally:
            for tower in replaced:
                setattr(sys.modules[tower.__module__], tower.__name__, tower)


def _tower_of(error: ImportError) -> type[PreTrainedModel] | None:
    """Return the class of the innermost model that was being built when `error` was raised."""
    building = [
        frame.f_locals.get("self")
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_name == "__init__"
    ]
    models = dict.fromkeys(type(one) for one in building if isinstance(one, PreTrainedModel))
    return [*models][-1] if len(models) > 1 else None


@contextmanager
def building_without(modules: Collection[str]) -> Iterator[None]:
    """Remove modules from the next model that transformers loads, before it reads any weight.

    transformers asks how weight names are converted once it has built the model on the meta device.
    A version that does not ask reads all weights.
    """
    find_conversions: Callable[..., Any] | None = getattr(modeling_utils, _CONVERSIONS, None)
    if find_conversions is None or not modules:
        yield
        return

    def remove_first(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        for name in modules:
            parent, _, leaf = name.rpartition(".")
            # Encoders check for a pooler, and call it; some have none.
            one = None if leaf == POOLER else LeftOut(model.get_submodule(name))
            setattr(model.get_submodule(parent), leaf, one)
        tied = model.all_tied_weights_keys
        model.all_tied_weights_keys = {
            name: source for name, source in tied.items() if not is_within(name, modules)
        }
        return find_conversions(model, *args, **kwargs)

    setattr(modeling_utils, _CONVERSIONS, remove_first)
    try:
        yield
    finally:
        setattr(modeling_utils, _CONVERSIONS, find_conversions)
