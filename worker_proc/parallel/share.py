"""The part of a model's heads, columns and tokens that a rank computes."""

from typing import NamedTuple

from worker_proc.errors import UnsupportedModel


class Share(NamedTuple):
    """A rank's part of units that are divided among ranks."""

    rank: int
    num_ranks: int

    def of(self, num_units: int) -> range:
        """Return this rank's units; if there are fewer units than ranks, some ranks share one.

        There may be none at all, for example without shared experts.
        """
        if 0 < num_units < self.num_ranks:
            unit = self.rank * num_units // self.num_ranks
            return range(unit, unit + 1)
        count = num_units // self.num_ranks
        return range(self.rank * count, (self.rank + 1) * count)

    def divides(self, num_units: int) -> bool:
        """Return whether all ranks get the same number of units."""
        return num_units % self.num_ranks == 0


class Section(NamedTuple):
    """Consecutive outputs or inputs of a matrix, in units that are not divided."""

    num_units: int
    unit: int
    """The number of outputs or inputs of a unit."""


def refuse(share: Share, reason: str) -> UnsupportedModel:
    """Return the error for a model that cannot be divided."""
    return UnsupportedModel(
        f"tensor_parallel_size {share.num_ranks} cannot divide the model: {reason}"
    )
