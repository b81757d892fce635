"""Experts whose weights are concatenated along the rows of one matrix (DBRX).

Their weights are stacked as those of other experts, so that the same kernels compute them.
"""

import torch
from torch import nn

_WEIGHTS = {"w1", "v1", "w2"}


class RestackedExperts(nn.Module):
    """Such experts, with their weights stacked as `gate_up_proj` and `down_proj`."""

    _own: nn.Module

    def __init__(self, own: nn.Module, num_experts: int) -> None:
        """`own` has gate, up and down projections `[num_experts * size, hidden_size]`."""
        super().__init__()
        mlp = own.get_submodule("mlp")
        gate, up, down = (
            mlp.get_parameter(name).detach().unflatten(0, (num_experts, -1))
            for name in ("w1", "v1", "w2")
        )
        self.gate_up_proj = nn.Parameter(torch.cat([gate, up], 1), requires_grad=False)
        self.down_proj = nn.Parameter(down.transpose(1, 2), requires_grad=False)
        self.act_fn = getattr(mlp, "activation_fn", None)
        self.is_transposed = False
        self.__dict__["_own"] = own  # no child: its weights are those of this module

    def forward(
        self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return `[num_rows, hidden_size]`, given `[num_rows, top_k]` experts and weights."""
        out: torch.Tensor = self._own(hidden, top_k_index, top_k_weights.to(hidden.dtype))
        return out.view(hidden.shape)


def restacked(module: nn.Module) -> RestackedExperts | None:
    """Return a module with the weights of such experts stacked; None if it is something else."""
    parts = dict(module.named_children())
    num_experts = getattr(module, "num_experts", None)
    if set(parts) != {"mlp"} or not isinstance(num_experts, int):
        return None
    weights = dict(parts["mlp"].named_parameters())
    shapes = {weight.shape for weight in weights.values()}
    if set(weights) != _WEIGHTS or len(shapes) > 1 or any(w.is_meta for w in weights.values()):
        return None
    shape = shapes.pop()
    fits = len(shape) == 2 and num_experts > 0 and shape[0] % num_experts == 0
    return RestackedExperts(module, num_experts) if fits else None
