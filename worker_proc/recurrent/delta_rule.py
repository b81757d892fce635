"""The gated delta rule of Gated DeltaNet and, with a decay for each key, of Kimi's attention."""

from typing import Any

import torch

from worker_proc.native.kernels import NativeLibrary
from worker_proc.recurrent.calls import check_arguments
from worker_proc.recurrent.rowwise import rowwise
from worker_proc.recurrent.scan import Norm, Scan, ScanRows, tiled_shape
from worker_proc.recurrent.state_pool import StatePool
from worker_proc.recurrent.state_spec import StateSpec

EPSILON = 1e-6
"""transformers' constant for normalizing queries and keys to unit length."""


class DeltaRule:
    """Replaces transformers' chunked delta rules in one module.

    All tensors have a first dimension of 1. `query` and `key` are `[T, num_key_heads, num_keys]`,
    `value` is `[T, num_heads, num_values]`, and `beta` and `g` are `[T, num_heads]`. `g` is the
    logarithm of the decay, and may have a last dimension for keys.
    """

    functions = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")

    def __init__(
        self, pool: StatePool, states: torch.Tensor, library: NativeLibrary | None
    ) -> None:
        self._scan = Scan(pool, states, library, corrects=True)

    @staticmethod
    def describe(  # noqa: PLR0917 (the signature is transformers')
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[StateSpec, tuple[torch.Tensor, None]]:
        """Return the state of a call on the meta device, and its result."""
        check_arguments("the delta rule", others)
        shape = tiled_shape(value.shape[2], key.shape[3], value.shape[3])
        gated_delta_rule, kimi_delta_attention = DeltaRule.functions
        function = kimi_delta_attention if g.dim() == 4 else gated_delta_rule
        spec = StateSpec(function, shape, is_window=False)
        return spec, (torch.empty_like(value), None)

    def __call__(  # noqa: PLR0917
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return `[1, T, num_heads, num_values]` and no state."""
        decays = rowwise(torch.exp, g[0].float())
        rows = ScanRows(query[0], key[0], value[0], decays, beta[0].float())
        epsilon = EPSILON if use_qk_l2norm_in_kernel else None
        out = self._scan(rows, Norm(query.shape[-1] ** -0.5, epsilon), Norm(1.0, epsilon))
        return out.unsqueeze(0), None
