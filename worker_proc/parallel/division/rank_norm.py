"""A norm that covers all heads, which are divided among ranks: the ranks add up their squares.

With all heads on one rank, the norm must reproduce the results of the model's own norm.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from worker_proc.errors import UnsupportedModel
from worker_proc.loading.deferred_module import make_generator
from worker_proc.modules.trial_errors import greatest, greatest_row_error

_NUM_ROWS = 5
_SCALES = (0.01, 1.0, 30.0)
"""The scales of random rows; small rows reveal the epsilon."""
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.02}


class RankNorm(nn.Module):
    """Root-mean-square normalization of a rank's values by the mean of those of all ranks."""

    def __init__(
        self, factors: torch.Tensor, epsilon: float, num_ranks: int, *, round_first: bool
    ) -> None:
        """With `round_first`, values are rounded before they are multiplied by the factors."""
        super().__init__()
        self.factors = nn.Parameter(factors.clone(), requires_grad=False)
        self.add_up: Callable[[torch.Tensor], None] | None = None
        """Replaces sums, `[T, 1]`, by those of all ranks; None: there are no other ranks."""
        self._epsilon = epsilon
        self._num_ranks = num_ranks
        self._round_first = round_first

    @property
    def is_shared(self) -> bool:
        """True if several ranks add up their sums."""
        return self._num_ranks > 1

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.normed(hidden.float())
        if self._round_first:
            return self.factors * normed.to(hidden.dtype)
        return (self.factors * normed).to(hidden.dtype)

    def normed(self, values: torch.Tensor) -> torch.Tensor:
        """Divide values, `[..., num_values]`, by the root of the mean of their squares."""
        squares, num_values = values.pow(2).sum(-1, keepdim=True), values.shape[-1]
        if self.is_shared and self.add_up is not None:
            squares = self.exchange(squares)
            num_values *= self._num_ranks
        return values * torch.rsqrt(squares / num_values + self._epsilon)

    def exchange(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the sums of the squares over all ranks."""
        assert self.add_up is not None
        rows = squares.view(-1, 1)
        self.add_up(rows)
        return rows.view(squares.shape)


def is_norm(module: nn.Module | None, num_values: int) -> bool:
    """Return whether a module may be a norm of `num_values`; it may be on the meta device."""
    if module is None or epsilon_of(module) is None or next(module.children(), None) is not None:
        return False
    parameters = dict(module.named_parameters())
    return set(parameters) == {"weight"} and parameters["weight"].shape == (num_values,)


@torch.inference_mode()
def divide_norm(norm: Any, kept: slice, num_ranks: int) -> RankNorm:
    """Return a rank's part of a norm; raise UnsupportedModel for a norm of another kind."""
    weight, epsilon = norm.weight.detach(), epsilon_of(norm)
    assert epsilon is not None
    errors = {}
    for round_first in (False, True):
        whole = RankNorm(weight, epsilon, 1, round_first=round_first)
        errors[round_first] = greatest(_error(norm, whole, scale) for scale in _SCALES)
    round_first = min(errors, key=errors.__getitem__)
    if not errors[round_first] <= MAX_ERROR[weight.dtype]:
        raise UnsupportedModel(
            f"tensor_parallel_size {num_ranks}: {type(norm).__name__} of all heads is not a"
            f" root-mean-square norm (relative error {errors[round_first]:.3g})"
        )
    return RankNorm(weight[kept], epsilon, num_ranks, round_first=round_first)


def epsilon_of(module: nn.Module) -> float | None:
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    return epsilon if isinstance(epsilon, float) else None


def _error(norm: Any, other: RankNorm, scale: float) -> float:
    rows = torch.randn(_NUM_ROWS, len(other.factors), generator=make_generator(4)) * scale
    rows = rows.to(other.factors.dtype)
    return greatest_row_error(other(rows).float(), norm(rows).float())
