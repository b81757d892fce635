"""Imports the model's libraries without the parts that a worker rarely uses, in half the time.

transformers imports torch's distributed tensors, and torch.compile with all of its dependencies,
only to mark how its own functions would be sharded or compiled. A worker does neither. torch itself
imports shape rules for its operators in Python, which only models on the meta device need.
"""

import functools
import gc
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from worker_proc.loading.deferred_module import META_KERNELS, defer
from worker_proc.loading.start_cache import StartCache
from worker_proc.startup.import_structure import Folder, fingerprint

_DYNAMO = "torch._dynamo"
_IMPORT_UTILS = "transformers.utils.import_utils"
_MODELS = "models"
"""transformers' folder with a subfolder for each model."""


@contextmanager
def lean_imports() -> Iterator[None]:
    """Hide distributed torch from imports, and defer torch.compile, within the context.

    Code that uses more of `torch._dynamo` than its decorators gets the real package. The garbage
    collector is off meanwhile, since nearly all new objects stay alive.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        _defer_meta_kernels()
        import torch.distributed

        _defer_dynamo()
        with _replaced(torch.distributed, "is_available", lambda: False):
            _import_transformers()
            yield
    finally:
        if was_enabled:
            gc.freeze()  # otherwise it would scan all of them repeatedly while a model loads
            gc.enable()


@contextmanager
def _replaced(module: ModuleType, name: str, value: object) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def _import_transformers() -> None:
    """Import transformers, using the list of models of an earlier start."""

    def replace(import_utils: ModuleType) -> None:
        scan = getattr(import_utils, "create_import_structure_from_path", None)
        if scan is None:  # another version of transformers
            return

        structure = functools.cache(lambda folder: _structure_of(folder, scan))

        def scan_folder(path: str | Path) -> Any:
            folder = Path(path).parent if Path(path).suffix else Path(path)
            return structure(folder) if folder.name == _MODELS else scan(path)

        replaced.enter_context(_replaced(import_utils, scan.__name__, scan_folder))

    with ExitStack() as replaced, _after_import(_IMPORT_UTILS, replace):
        import transformers.models  # noqa: F401


@contextmanager
def _after_import(name: str, act: Callable[[ModuleType], None]) -> Iterator[None]:
    """Call `act` on a module right after its code has run, before other modules use it."""
    finder = _Finder(name, act)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds one module as usual, with a loader that also calls a function."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self._act(module)

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


def _structure_of(folder: Path, scan: Callable[[Path], Any]) -> Any:
    """Return the result of `scan` for a folder, which takes half a second, or a stored one."""
    cache = StartCache("imports", [fingerprint(folder)])
    kept = cache.get("structure", Folder)
    if kept is not None:
        return kept.structure()
    scanned = scan(folder)
    folder_to_keep = Folder.of(scanned)
    if folder_to_keep is not None:
        cache.put("structure", folder_to_keep)
    return scanned


def _defer_meta_kernels() -> None:
    torch = importlib.util.find_spec("torch")
    if torch is None or "torch" in sys.modules:
        return
    # find_spec(META_KERNELS) would import torch.
    spec = PathFinder.find_spec(META_KERNELS, torch.submodule_search_locations)
    if spec is not None:
        defer(spec)


def _defer_dynamo() -> None:
    spec = None if _DYNAMO in sys.modules else importlib.util.find_spec(_DYNAMO)
    if spec is None:
        return
    module = defer(spec)
    for name in ("allow_in_graph", "assume_constant_result", "disable"):
        setattr(module, name, _as_it_is)


def _as_it_is(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """Decorate a function, with or without arguments, by returning it."""
    return _as_it_is if function is None else function
