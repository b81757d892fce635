"""Lightning attention: linear attention whose state decays by a constant for each head.

transformers' module calls no function that could be replaced, so its forward is rewritten here in
terms of the module's parts. Like all recurrent modules, it is compared with its own forward.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from worker_proc.native.kernels import NativeLibrary
from worker_proc.recurrent.rowwise import RowwiseFunctions
from worker_proc.recurrent.scan import Scan, ScanRows, tiled_shape
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.state_spec import RecurrentSpec, StateSpec

LIGHTNING = "lightning attention"
_CHILDREN = {"act_fn", "norm", "out_proj", "output_gate", "qkv_proj"}


def is_lightning(module: nn.Module) -> bool:
    """Return whether a module has the parts of lightning attention."""
    children = {name for name, _ in module.named_children()}
    slopes = getattr(module, "slope_rate", None)
    has_slopes = isinstance(slopes, torch.Tensor) and slopes.dim() == 3
    has_code = hasattr(module, "get_slope_rate") and hasattr(module, "decay_factors")
    return children == _CHILDREN and has_slopes and has_code


def lightning_spec(module: nn.Module, name: str) -> RecurrentSpec:
    """Return a module's state: each head's sum of keys ⊗ values."""
    num_heads = _num_heads(module)
    linear: Any = module.qkv_proj
    dim = linear.out_features // (3 * num_heads)
    state = StateSpec(LIGHTNING, tiled_shape(num_heads, dim, dim), is_window=False)
    return RecurrentSpec(name, linear.in_features, (state,))


def slopes_of(module: nn.Module) -> torch.Tensor:
    """Return the logarithms of a module's decays, `[num_heads, 1, 1]`, in float32.

    The module's code computes them again, since its buffers are rounded to the model's dtype.
    """
    any_module: Any = module
    stored: torch.Tensor = any_module.slope_rate
    made: torch.Tensor = any_module.get_slope_rate().float()
    rounded = made.to(stored.dtype).to(torch.bfloat16)
    return made if torch.equal(rounded, stored.to(torch.bfloat16)) else stored.float()


def widen_decays(module: nn.Module) -> None:
    """Make a module's own forward in float32 use decays that are not rounded."""
    any_module: Any = module
    slopes = slopes_of(module)
    any_module.slope_rate = slopes
    factors = any_module.decay_factors(slopes)
    any_module.query_decay, any_module.key_decay, any_module.diagonal_decay = factors


class LightningLayer:
    """The forward of one module over packed rows."""

    def __init__(
        self, module: nn.Module, spec: RecurrentSpec, library: NativeLibrary | None
    ) -> None:
        self.spec = spec
        self.is_rowwise = True
        self.plain_products: Sequence[str] = ()
        self._module: Any = module
        self._num_heads = _num_heads(module)
        self._decays = torch.exp(-slopes_of(module)).view(1, -1)
        self._library = library
        self._scan: Scan | None = None

    def attach(self, pool: StatePool) -> None:
        """Use the states of `pool` from now on."""
        states = pool.tensors[self.spec.module_name][0]
        self._scan = Scan(pool, states, self._library, corrects=False)

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None]:
        """Return `[1, T, hidden_size]`, given the same shape, and no state."""
        assert self._scan is not None
        module = self._module
        with RowwiseFunctions():
            mixed = module.act_fn(module.qkv_proj(hidden_states))[0]
            heads = mixed.view(len(mixed), self._num_heads, -1)
            queries, keys, values = heads.chunk(3, dim=2)
            decays = self._decays.expand(len(mixed), -1)
            rows = ScanRows(queries, keys, values, decays, torch.ones_like(decays))
            out = module.norm(self._scan(rows).flatten(1).unsqueeze(0))
            out = functional.sigmoid(module.output_gate(hidden_states)) * out
            return module.out_proj(out), None


def _num_heads(module: nn.Module) -> int:
    slopes: Any = module.slope_rate
    return len(slopes)
