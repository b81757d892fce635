"""Which part of a model's heads, columns and tokens a rank has."""

from typing import NamedTuple

from worker_proc.errors import UnsupportedModel


class Share(NamedTuple):
    """A rank's part of what is divided."""

    rank: int
    num_ranks: int

    def of(self, num_units: int) -> range:
        """Return the units of a rank; several ranks have the same one if there are fewer units."""
        if num_units < self.num_ranks:
            unit = self.rank * num_units // self.num_ranks
            return range(unit, unit + 1)
        count = num_units // self.num_ranks
        return range(self.rank * count, (self.rank + 1) * count)

    def divides(self, num_units: int) -> bool:
        """Return whether all ranks get as many units."""
        return num_units % self.num_ranks == 0


class Section(NamedTuple):
    """Consecutive outputs or inputs of a matrix, in units that stay together."""

    num_units: int
    unit: int


def refuse(share: Share, reason: str) -> UnsupportedModel:
    """Return the error for a model that cannot be divided."""
    return UnsupportedModel(
        f"tensor_parallel_size {share.num_ranks} cannot divide the model: {reason}"
    )
