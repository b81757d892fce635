"""A gated norm of groups of heads, which are divided among ranks.

A rank has whole groups, or a part of one group. Ranks with parts of the same group add up their
squares. With all groups on one rank, the norm must reproduce the results of the model's own norm.
"""

from typing import Any

import torch
from torch.nn import functional

from worker_proc.loading.deferred_module import make_generator
from worker_proc.modules.trial_errors import greatest, greatest_row_error
from worker_proc.parallel.division.rank_norm import MAX_ERROR, RankNorm, epsilon_of
from worker_proc.parallel.share import Section, Share, refuse

_NUM_ROWS = 5
_SCALES = (0.01, 1.0, 30.0)
"""The scales of random rows; small rows reveal the epsilon."""
_ALONE = Share(0, 1)


class GatedRankNorm(RankNorm):
    """Root-mean-square normalization of a rank's groups, before or after the gates."""

    def __init__(
        self,
        factors: torch.Tensor,
        epsilon: float,
        groups: Section,
        share: Share,
        *,
        round_first: bool,
        gate_first: bool,
    ) -> None:
        """`factors` are those of all ranks.

        With `gate_first`, values are gated before they are normalized.
        """
        num_parts = max(share.num_ranks // groups.num_units, 1)
        own = share.of(groups.num_units)
        size = groups.unit // num_parts
        first = own.start * groups.unit + share.rank % num_parts * size
        kept = factors[first : first + len(own) * size]
        super().__init__(kept, epsilon, num_parts, round_first=round_first)
        self._own = own
        self._num_groups = groups.num_units
        self._gate_first = gate_first

    def forward(self, hidden: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        values = hidden.float()
        gates = None if gate is None else functional.silu(gate.float())
        if gates is not None and self._gate_first:
            values = values * gates
        normed = self.normed(values.unflatten(-1, (len(self._own), -1))).flatten(-2)
        if self._round_first:
            normed = self.factors * normed.to(hidden.dtype)
        else:
            normed = self.factors * normed
        if gates is not None and not self._gate_first:
            normed = normed * gates
        return normed.to(hidden.dtype)

    def exchange(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the sums of the group's squares over all ranks.

        Each group has a column, since all ranks take part in the sum.
        """
        assert self.add_up is not None
        rows = squares.new_zeros(squares.numel(), self._num_groups)
        rows[:, self._own.start] = squares.view(-1)
        self.add_up(rows)
        return rows[:, self._own.start].view(squares.shape)


@torch.inference_mode()
def divide_gated_norm(norm: Any, groups: Section, share: Share) -> GatedRankNorm:
    """Return a rank's part of a gated norm; raise UnsupportedModel for a norm of another kind."""
    weight, epsilon = norm.weight.detach(), epsilon_of(norm)
    assert epsilon is not None
    errors = {}
    for gate_first in (True, False):
        for round_first in (False, True):
            orders = {"round_first": round_first, "gate_first": gate_first}
            whole = GatedRankNorm(weight, epsilon, groups, _ALONE, **orders)
            error = greatest(_error(norm, whole, scale) for scale in _SCALES)
            errors[round_first, gate_first] = error
    round_first, gate_first = min(errors, key=errors.__getitem__)
    if not errors[round_first, gate_first] <= MAX_ERROR[weight.dtype]:
        raise refuse(
            share,
            f"{type(norm).__name__} is not a gated root-mean-square norm of {groups.num_units}"
            f" groups (relative error {errors[round_first, gate_first]:.3g})",
        )
    return GatedRankNorm(
        weight, epsilon, groups, share, round_first=round_first, gate_first=gate_first
    )


def _error(norm: Any, other: GatedRankNorm, scale: float) -> float:
    generator, width = make_generator(4), len(other.factors)
    rows, gates = (torch.randn(1, _NUM_ROWS, width, generator=generator) for _ in range(2))
    rows, gates = ((one * scale).to(other.factors.dtype) for one in (rows, gates))
    return greatest_row_error(other(rows, gates).float(), norm(rows, gates).float())
