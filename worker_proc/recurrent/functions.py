"""Runs the forward of transformers' recurrent modules with some functions replaced.

A recurrent module calls functions of its source file: a causal convolution, and a scan over the
tokens of one text. They do not support packed rows. Here the code of a module's own forward runs
with our functions under their names; its projections, norms and everything else stay as they are.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import nn

from worker_proc.native.kernels import NativeLibrary
from worker_proc.recurrent.convolution import CausalConvolution
from worker_proc.recurrent.delta_rule import DeltaRule
from worker_proc.recurrent.mamba2 import Mamba2Scan
from worker_proc.recurrent.rowwise import RowwiseFunctions
from worker_proc.recurrent.selective_scan import SelectiveScan
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.state_spec import RecurrentSpec, StateSpec


class Operation(Protocol):
    """Replaces one of transformers' functions, in one module."""

    def __init__(
        self, pool: StatePool, states: torch.Tensor, library: NativeLibrary | None
    ) -> None: ...

    @staticmethod
    def describe(*args: Any, **kwargs: Any) -> tuple[StateSpec, Any]:
        """Return the state of a call on the meta device, and its result."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the function over the packed rows of the current step."""


OPERATIONS: Mapping[str, type[Operation]] = {
    CausalConvolution.function: CausalConvolution,
    **dict.fromkeys(DeltaRule.functions, DeltaRule),
    Mamba2Scan.function: Mamba2Scan,
    SelectiveScan.function: SelectiveScan,
}
"""The operations, by the name of the function that they replace."""


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module's forward calls one of the functions."""
    names = _names_in(module)
    return any(name in OPERATIONS for name in names)


def _names_in(module: nn.Module) -> tuple[str, ...]:
    function = inspect.unwrap(type(module).forward)
    code = getattr(function, "__code__", None)
    return () if code is None else code.co_names


def forward_with(module: nn.Module, functions: Mapping[str, Callable[..., Any]]) -> MethodType:
    """Return a forward that runs the class's code with some global names bound to `functions`."""
    own = inspect.unwrap(type(module).forward)
    assert isinstance(own, FunctionType)
    names = {**own.__globals__, **functions}
    function = FunctionType(own.__code__, names, own.__name__, own.__defaults__, own.__closure__)
    function.__kwdefaults__ = own.__kwdefaults__
    return MethodType(function, module)


class RecurrentLayer:
    """The forward of one recurrent module over packed rows."""

    def __init__(
        self, module: nn.Module, spec: RecurrentSpec, library: NativeLibrary | None
    ) -> None:
        self.spec = spec
        self.is_rowwise = False
        """True if the forward's elementwise functions are computed by `rowwise`."""
        self.plain_products: Sequence[str] = ()
        """The module's own weights that torch multiplies rows by."""
        self._library = library
        self._operations: list[Operation] = []
        self._num_called = 0
        names = {state.function for state in spec.states}
        self._forward = forward_with(module, {name: self._function(name) for name in names})

    def attach(self, pool: StatePool) -> None:
        """Use the states of `pool` from now on."""
        tensors = pool.tensors[self.spec.module_name]
        self._operations = [
            OPERATIONS[state.function](pool, tensor, self._library)
            for state, tensor in zip(self.spec.states, tensors, strict=True)
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output of the module's own forward, for packed rows."""
        self._num_called = 0
        if not self.is_rowwise:
            return self._forward(*args, **kwargs)
        with RowwiseFunctions():
            return self._forward(*args, **kwargs)

    def _function(self, name: str) -> Callable[..., Any]:
        """Return a function that calls the next operation, which must have this name."""

        def call(*args: Any, **kwargs: Any) -> Any:
            number = self._num_called
            self._num_called += 1
            assert self.spec.states[number].function == name
            return self._operations[number](*args, **kwargs)

        return call
