"""Notes the variants of kernels that Triton would compile on a GPU, while they are interpreted.

A variant follows from constants and, unless a kernel excludes an argument, from whether a number is
1 or a multiple of 16, and from whether a pointer is aligned.
"""

import inspect
from typing import Any

import pytest
from triton._C.libtriton import native_specialize_impl
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.interpreter import InterpretedFunction

Variants = set[tuple[object, ...]]


def note_variants(patch: pytest.MonkeyPatch) -> Variants:
    """Return a set that takes the variants of all kernels that are launched from now on."""
    variants: Variants = set()
    run = InterpretedFunction.run

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        variants.add(_variant(self, args, kwargs))
        return run(self, *args, **kwargs)

    patch.setattr(InterpretedFunction, "run", noted)
    return variants


def _variant(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
    signature = inspect.signature(function.fn)
    given = {name: value for name, value in kwargs.items() if name in signature.parameters}
    fixed = function.kwargs.get("do_not_specialize") or ()
    key: list[object] = [function.__name__]
    for name, value in signature.bind(*args, **given).arguments.items():
        if name.isupper():
            key.append(value)
            continue
        for part in value if isinstance(value, tuple) else (value,):
            key.append(native_specialize_impl(CUDABackend, part, False, name not in fixed, True))
    return tuple(key)
