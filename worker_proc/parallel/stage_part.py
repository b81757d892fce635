"""The computation of a step in a pipeline stage: rows of the previous stage enter its model."""

import torch
from torch import nn

from worker_proc.attention.interface import AttentionBackend
from worker_proc.forward import compute_logits
from worker_proc.inputs import StepInputs
from worker_proc.loading.passages import StageModel
from worker_proc.parallel.pipe import StagePipe


class StagePart:
    """The model of a stage, and its channels to the other stages."""

    def __init__(self, model: StageModel, pipe: StagePipe, row_dtype: torch.dtype) -> None:
        self.model = model
        self.pipe = pipe
        self._dtype = row_dtype

    def compute_logits(
        self, model: nn.Module, backend: AttentionBackend, inputs: StepInputs, vocab_size: int
    ) -> torch.Tensor:
        """Compute a step over the rows of the previous stage, if there is one.

        Only the result of the last stage has a meaning.
        """
        if not self.pipe.stage.is_first:
            shape = (inputs.input_ids.shape[1], self.model.row_width)
            rows = torch.empty(shape, dtype=self._dtype)
            self.pipe.receive(rows)
            self.model.take(rows.unsqueeze(0))
        return compute_logits(model, backend, inputs, vocab_size)
