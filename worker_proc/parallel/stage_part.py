"""A stage as it computes steps: what its model takes in, and the channels to the other stages."""

import torch
from torch import nn

from worker_proc.attention.interface import AttentionBackend
from worker_proc.forward import compute_logits
from worker_proc.inputs import StepInputs
from worker_proc.loading.passages import StageModel
from worker_proc.parallel.pipe import StagePipe


class StagePart:
    """Passes rows from the stage before into the model, and from there on."""

    def __init__(self, model: StageModel, pipe: StagePipe, row_dtype: torch.dtype) -> None:
        self.model = model
        self.pipe = pipe
        self._dtype = row_dtype

    def compute_logits(
        self, model: nn.Module, backend: AttentionBackend, inputs: StepInputs, vocab_size: int
    ) -> torch.Tensor:
        """Compute a step over the rows of the stage before, if there is one.

        What a stage other than the last one returns means nothing.
        """
        if not self.pipe.stage.is_first:
            shape = (inputs.input_ids.shape[1], self.model.row_width)
            rows = torch.empty(shape, dtype=self._dtype)
            self.pipe.receive(rows)
            self.model.take(rows.unsqueeze(0))
        return compute_logits(model, backend, inputs, vocab_size)
