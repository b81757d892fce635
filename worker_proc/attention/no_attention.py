"""The backend of models without attention, whose layers all have a recurrent state."""

import torch

from worker_proc.attention.interface import PagedLayer, Rows, Scoring
from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.kv.kv_tensors import Shapes


class NoAttention:
    """Nothing attends."""

    name = "none"

    def __init__(self, *, has_kernels: bool) -> None:
        """Take whether the recurrent layers are computed by the native kernels."""
        self.depends_on_batch = not has_kernels

    def pool_shapes(self, spec: LayerSpec, num_blocks: int) -> Shapes:
        raise NotImplementedError

    def begin_step(self, inputs: StepInputs) -> None:
        """Do nothing: no layer has keys and values."""

    def attend(self, layer: PagedLayer, rows: Rows, scoring: Scoring) -> torch.Tensor:
        raise NotImplementedError
