"""Prepares Triton for tests: its kernels run on a GPU, or are interpreted on the CPU.

The interpreter keeps bfloat16 as integers: it multiplies matrices of these bits, and cuts values
off where a GPU rounds. Its products are those of a library for CPUs, in which the bits of a row may
depend on its place in the matrix; on a GPU they do not. All three are corrected here, so that the
kernels can be tested as they are. It also patches Triton's language again at each call of a
function, and makes the shape of a tensor anew for each result, which took most of the time.
"""

import importlib.util
import os
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NEEDS_TORCH_WITH_CUDA = "PyTorch cannot use this machine's GPU; set TRITON_INTERPRET=1"
NEEDS_TRITON = "needs Triton; scripts/setup dev installs it on Linux with x86-64"


def prepare_triton() -> None:
    """Skip the module that calls this where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip(NEEDS_TRITON, allow_module_level=True)
    if DEVICE.type == "cpu":
        if os.environ.get("TRITON_INTERPRET") != "1":  # tests/conftest.py sets it
            pytest.skip(NEEDS_TORCH_WITH_CUDA, allow_module_level=True)
        _correct_products_and_bfloat16()
        _patch_language_once()
        _share_shapes()


def _correct_products_and_bfloat16() -> None:
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if hasattr(InterpreterBuilder, "is_corrected"):
        return
    cast = InterpreterBuilder.cast_impl

    def create_dot(self: Any, a: Any, b: Any, added: Any, *_: Any) -> Any:
        left, right = (
            self.cast_impl(operand, tl.float32).data
            if operand.dtype.scalar == tl.bfloat16
            else operand.data
            for operand in (a, b)
        )
        dtype = added.data.dtype
        rows = [np.matmul(row, right, dtype=dtype) for row in left]
        return TensorHandle(np.stack(rows) + added.data, added.dtype.scalar)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        kinds = source.dtype.scalar, target.scalar
        if kinds == (tl.bfloat16, tl.float32):
            return TensorHandle((source.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        if kinds == (tl.float32, tl.bfloat16):
            values = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16()
            return TensorHandle(values.view(torch.uint16).numpy(), tl.bfloat16)
        return cast(self, source, target)

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.is_corrected = True


def _patch_language_once() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    if hasattr(InterpretedFunction, "is_quick"):
        return
    call = InterpretedFunction.__call__
    patched: set[str] = set()
    """Modules of Triton's own functions, for which the language stays patched."""

    def call_quickly(self: Any, *args: Any, **options: Any) -> Any:
        module = self.fn.__module__
        # Our own have the language of the kernel, which is patched.
        if module.startswith("worker_proc.") or module in patched:
            return self.rewrite()(*args, **options)
        if module == "triton.language.standard":
            patched.add(module)
        return call(self, *args, **options)

    InterpretedFunction.__call__ = call_quickly
    InterpretedFunction.is_quick = True


def _share_shapes() -> None:
    """Give types of the same elements and shape, and their tensors, the attributes of the first."""
    import triton.language as tl

    if hasattr(tl.tensor, "is_shared"):
        return
    init_type, init_tensor = tl.block_type.__init__, tl.tensor.__init__
    of_types: dict[tuple[Any, ...], dict[str, Any]] = {}
    of_tensors: dict[str, dict[str, Any]] = {}

    def init_type_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key in of_types:
            self.__dict__.update(of_types[key])
        else:
            init_type(self, element_ty, shape)
            of_types[key] = dict(self.__dict__)

    def init_tensor_once(self: Any, handle: Any, type: Any) -> None:
        if type.name in of_tensors:
            self.__dict__.update(of_tensors[type.name], handle=handle, type=type)
        else:
            init_tensor(self, handle, type)
            of_tensors[type.name] = dict(self.__dict__)

    tl.block_type.__init__, tl.tensor.__init__ = init_type_once, init_tensor_once
    tl.tensor.is_shared = True
