"""Imports the model's libraries without what a worker never uses: in about half of the time.

transformers imports torch's tensors for sharded models, and torch.compile with all that belongs to
it, only to say of its own functions how they would be sharded or compiled. A worker does neither.
"""

import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

_DYNAMO = "torch._dynamo"
_DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")


@contextmanager
def lean_imports() -> Iterator[None]:
    """While entered, what is imported finds no sharding, and torch.compile only by name.

    Whoever needs more of `torch._dynamo` than its decorators, then or later, gets the real package.
    The garbage collector rests meanwhile: nearly all that is made stays.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        import torch.distributed

        _defer_dynamo()
        with _replaced(torch.distributed, "is_available", lambda: False):
            _scan_models_once()
            yield
    finally:
        if was_enabled:
            gc.freeze()  # else it would look through all of it again and again while a model loads
            gc.enable()


@contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def _scan_models_once() -> None:
    """transformers reads all of its models to learn their names: for itself and for a package."""
    from transformers.utils import import_utils

    scan = getattr(import_utils, "create_import_structure_from_path", None)
    if scan is None:  # another version, which may read them as often as it likes
        return

    def scan_folder(path: str | Path) -> Any:
        path = Path(path)
        return scan(path.parent if path.suffix else path)  # a file stands for its folder

    with _replaced(import_utils, "create_import_structure_from_path", scan_folder):
        import transformers.models  # noqa: F401


class _Deferred(ModuleType):
    """A package of which only some names are there until another is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__class__ = ModuleType  # type: ignore[assignment]
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)
        return getattr(self, name)


def _defer_dynamo() -> None:
    spec = None if _DYNAMO in sys.modules else importlib.util.find_spec(_DYNAMO)
    if spec is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _Deferred
    for name in _DECORATORS:
        setattr(module, name, _as_it_is)
    sys.modules[_DYNAMO] = module


def _as_it_is(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """A decorator, with arguments or without, of what is never compiled."""
    return _as_it_is if function is None else function
