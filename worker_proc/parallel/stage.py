"""The place of a rank's stage in a pipeline, and the layers that the stage computes."""

from typing import NamedTuple

from protocol.config import ParallelConfig
from worker_proc.parallel.share import Share


class Stage(NamedTuple):
    """The number of a stage, and the number of all stages."""

    place: int
    num_stages: int

    @property
    def is_first(self) -> bool:
        return self.place == 0

    @property
    def is_last(self) -> bool:
        return self.place == self.num_stages - 1

    def layers(self, num_layers: int, head_layers: int = 0) -> range:
        """Return the stage's layers, at least one.

        The output layer counts as `head_layers` layers of the last stage.
        """
        ends = []
        for end in (self.place, self.place + 1):
            min_end, max_end = end, num_layers - (self.num_stages - end)
            share = -(-(num_layers + head_layers) * end // self.num_stages)
            ends.append(min(max(share, min_end), max_end))
        return range(*ends)


def places(rank: int, parallel: ParallelConfig) -> tuple[Stage, Share]:
    """Return the stage of a rank, and its share of the matrices of that stage."""
    place, share = divmod(rank, parallel.tensor_parallel_size)
    return (
        Stage(place, parallel.pipeline_parallel_size),
        Share(share, parallel.tensor_parallel_size),
    )
