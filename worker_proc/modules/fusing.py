"""Replaces modules that transformers computes in many passes by single-pass kernels.

Modules do not qualify by their names: a candidate's own forward runs on random rows, small,
ordinary and large. If it does not agree with the kernel, the module is kept.

The kernels compute every row alike. torch computes elementwise functions in vectors, and the end of
a tensor differently, so a row's bits can depend on its position in the tensor.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import chain

import torch
from torch import nn

from worker_proc.modules.experts.grouped import GroupedExperts, fused_grouped_experts
from worker_proc.modules.experts.mixture import fused_experts
from worker_proc.modules.experts.own_forward import pack_own_experts
from worker_proc.modules.experts.own_gates import OwnGatedExperts, own_gated_experts
from worker_proc.modules.experts.restacked import restacked
from worker_proc.modules.experts.router import install_router
from worker_proc.modules.experts.scaled import scaled_experts
from worker_proc.modules.mlp import fused_mlp
from worker_proc.modules.pointwise import FusedActivation, activation_of, fused_norm
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary
from worker_proc.native.packed_weights import Format
from worker_proc.native.structures import Activation

_MLP_CHILDREN = ({"gate_proj", "up_proj", "down_proj"}, {"gate_up_proj", "down_proj"})
_ACTIVATIONS = {"act_fn", "activation_fn"}
SCALED_KEY = " scaled"
"""Suffix, after the mixture's path, of the key of a mixture whose experts take scaled rows."""
ROUTER_KEY = " router"
"""Suffix, after the parent's path, of a router's key among the proven modules."""
OWN_GATE = -1
"""The kernel number of experts whose gates the module's own code computes."""
OWN_FORWARD = -2
"""The kernel number of experts whose own forward multiplies by packed matrices."""


def fuse_modules(
    model: nn.Module,
    library: NativeLibrary,
    dtype: torch.dtype,
    proven: Mapping[str, int] | None = None,
    *,
    format: Format = Format.UNITS,
    on_tried: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, int]:
    """Replace modules for which a kernel is proven; call it before packing.

    Returns the number of each replaced module's kernel, by the module's name, and the output width
    of routers. `proven` is such a result of an earlier start; with it, nothing is tried. Calls
    `on_tried(done, total)` with the number of modules whose children have been tried.
    """
    fusing = _Fusing(library, dtype, format, proven)
    parents = list(model.named_modules())
    for done, (path, parent) in enumerate(parents):
        on_tried(done, len(parents))
        fusing.fuse_parts(parent, path)
    return fusing.fused


class _Fusing:
    """One pass over the modules of a model, which replaces those with a kernel."""

    def __init__(
        self,
        library: NativeLibrary,
        dtype: torch.dtype,
        format: Format,
        proven: Mapping[str, int] | None,
    ) -> None:
        """`proven` is the result `fused` of an earlier start; None: modules are tried."""
        self.fused: dict[str, int] = {}
        """What `fuse_modules` returns."""
        self._library = library
        self._dtype = dtype
        self._format = format
        self._proven = proven
        self._gone: set[nn.Module] = set()
        self._made: dict[tuple[int, ...], nn.Module] = {}
        """Replacements by kernel number and parameters, since modules may be tied."""

    def fuse_parts(self, parent: nn.Module, path: str) -> None:
        """Replace the children of a module, and the router and experts of a mixture."""
        if parent in self._gone:
            return
        self._fuse_scaled_experts(parent, path)
        for name, child in parent.named_children():
            child_path = f"{path}.{name}".lstrip(".")
            if not self._may_fuse(child_path):
                continue
            parameters = tuple(map(id, child.parameters()))
            number = self._number(child_path)
            found = self._replacement(child, number)
            if found is not None:
                self.fused[child_path], replacement = found
                if parameters:
                    replacement = self._made.setdefault((found[0], *parameters), replacement)
                setattr(parent, name, replacement)
                if isinstance(replacement, GroupedExperts | OwnGatedExperts):
                    self._install_router(parent, path)
                self._gone.update(child.modules())
                for part in child.modules():  # other references may exist: drop their weights
                    part._parameters.clear()
            elif self._packs_own_experts(child, number):
                self.fused[child_path] = OWN_FORWARD
                self._install_router(parent, path)

    def _may_fuse(self, key: str) -> bool:
        return self._proven is None or key in self._proven

    def _number(self, key: str) -> int | None:
        """Return the number that an earlier start has proven; None: it is tried."""
        return None if self._proven is None else self._proven[key]

    def _fuse_scaled_experts(self, parent: nn.Module, path: str) -> None:
        """Replace experts whose rows are multiplied by scores first: their interface differs."""
        key = f"{path}{SCALED_KEY}"
        own = dict(parent.named_children()).get("experts")
        if own is None or self._dtype not in NATIVE_DTYPES or not self._may_fuse(key):
            return
        number = self._number(key)
        of = partial(activation_of, library=self._library, number=number)
        experts = scaled_experts(
            parent, self._library, of, self._format, is_proven=number is not None
        )
        if experts is not None:
            self._gone.add(own)
            own._parameters.clear()
            self.fused[key] = int(experts.products.gating.activation)
            self._install_router(parent, path)

    def _install_router(self, parent: nn.Module, path: str) -> None:
        """Make a router compute each row independently of the other rows."""
        key = f"{path}{ROUTER_KEY}"
        if self._may_fuse(key):
            width = install_router(parent, self._library, self._dtype, self._number(key))
            if width is not None:
                self.fused[key] = width

    @torch.inference_mode()
    def _replacement(self, module: nn.Module, number: int | None) -> tuple[int, nn.Module] | None:
        """Return the number of a module's kernel among those of its kind, and its replacement."""
        if self._dtype not in NATIVE_DTYPES or number == OWN_FORWARD:
            return None
        if any(parameter.numel() == 0 for parameter in module.parameters()):
            return None  # for example without shared experts
        names = {name for name, _ in module.named_children()}
        if names - _ACTIVATIONS in _MLP_CHILDREN:
            return fused_mlp(module, self._library, number, self._format)
        if names == {"gate", "experts"}:
            return fused_experts(module, self._library, number, self._format)
        if getattr(module, "down_proj", None) is not None and not names - _ACTIVATIONS:
            return self._grouped_experts(module, number)
        if self._format is Format.UNITS and (experts := restacked(module)) is not None:
            return self._grouped_experts(experts, number)
        if not names and next(chain(module.parameters(), module.buffers()), None) is None:
            activation = activation_of(module, self._library, number=number)
            if activation is None:
                return None
            return activation, FusedActivation(self._library, activation)
        return fused_norm(module, self._library, self._dtype, number)

    def _grouped_experts(
        self, module: nn.Module, number: int | None
    ) -> tuple[int, GroupedExperts | OwnGatedExperts] | None:
        """Return a module for experts that keep their router, and the number of its activation."""
        library, format, is_proven = self._library, self._format, number is not None
        if number != OWN_GATE:
            activation = activation_of(getattr(module, "act_fn", None), library, number=number)
            found = fused_grouped_experts(module, library, activation, format, is_proven=is_proven)
            if found is not None:
                return int(activation or Activation.SILU), found
        if format is Format.UNITS and number in (None, OWN_GATE):
            own = own_gated_experts(module, library, is_proven=is_proven)
            return None if own is None else (OWN_GATE, own)
        return None

    def _packs_own_experts(self, module: nn.Module, number: int | None) -> bool:
        """Make a module's own forward multiply by packed matrices, if it computes experts."""
        if self._format is not Format.UNITS or number not in (None, OWN_FORWARD):
            return False
        return pack_own_experts(module, self._library, is_proven=number is not None)
