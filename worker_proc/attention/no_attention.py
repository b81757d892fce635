"""The backend of models without attention, all of whose layers have a recurrent state."""

import torch

from worker_proc.attention.interface import PagedLayer, Rows, Scoring
from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.kv.kv_tensors import Shapes


class NoAttention:
    """A backend that never attends."""

    name = "none"

    def __init__(self, *, has_kernels: bool) -> None:
        """`has_kernels`: the native kernels compute the recurrent layers."""
        self.depends_on_batch = not has_kernels

    def pool_shapes(self, spec: LayerSpec, num_blocks: int) -> Shapes:
        raise NotImplementedError

    def begin_step(self, inputs: StepInputs) -> None:
        """Do nothing: no layer has keys and values."""

    def attend(self, layer: PagedLayer, rows: Rows, scoring: Scoring) -> torch.Tensor:
        raise NotImplementedError
