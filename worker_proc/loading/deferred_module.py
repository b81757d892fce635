"""Modules of libraries that are loaded on first use instead of with the library."""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

META_KERNELS = "torch._meta_registrations"


class DeferredModule(ModuleType):
    """A module whose code runs when a missing attribute is first accessed."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.load()
        return getattr(self, name)

    def load(self) -> None:
        """Execute the module's code; afterwards it is an ordinary module."""
        self.__class__ = ModuleType  # type: ignore[assignment]
        load_meta_kernels()  # the compiler needs them, too
        assert self.__spec__ is not None
        assert self.__spec__.loader is not None
        self.__spec__.loader.exec_module(self)


def defer(spec: ModuleSpec) -> ModuleType:
    """Add a module to sys.modules without executing its code."""
    module = importlib.util.module_from_spec(spec)
    module.__class__ = DeferredModule
    sys.modules[spec.name] = module
    return module


def load_meta_kernels() -> None:
    """Load the shape rules, without which some operators fail on the meta device."""
    module = sys.modules.get(META_KERNELS)
    if isinstance(module, DeferredModule):
        module.load()


def make_generator(seed: int) -> "torch.Generator":
    """Return a random generator; torch cannot create one before its shape rules are loaded."""
    import torch

    load_meta_kernels()
    return torch.Generator().manual_seed(seed)
