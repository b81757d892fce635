"""Imports the model's libraries without the parts that a worker never uses, in half of the time.

transformers imports torch's distributed tensors, and torch.compile with all of its dependencies,
only to mark how its own functions would be sharded or compiled. A worker does neither.
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


@contextmanager
def lean_imports() -> Iterator[None]:
    """Within this context, imports find no distributed torch, and torch.compile only by name.

    Code that uses more of `torch._dynamo` than its decorators gets the real package.
    The garbage collector is off meanwhile, since nearly all new objects stay.
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
            gc.freeze()  # or it would scan all of them repeatedly while a model loads
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
    """Let transformers read its models for their names once; it does so for two packages."""
    from transformers.utils import import_utils

    scan = getattr(import_utils, "create_import_structure_from_path", None)
    if scan is None:  # another version of transformers
        return

    def scan_folder(path: str | Path) -> Any:
        path = Path(path)
        return scan(path.parent if path.suffix else path)  # a file stands for its folder

    with _replaced(import_utils, "create_import_structure_from_path", scan_folder):
        import transformers.models  # noqa: F401


class _Deferred(ModuleType):
    """A package with a few names, which is loaded when another one is accessed."""

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
    for name in ("allow_in_graph", "assume_constant_result", "disable"):
        setattr(module, name, _as_it_is)
    sys.modules[_DYNAMO] = module


def _as_it_is(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """A decorator, with or without arguments, that returns its function."""
    return _as_it_is if function is None else function
