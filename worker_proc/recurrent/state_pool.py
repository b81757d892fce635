"""The pool of state blocks: the states of texts in all recurrent modules of a model."""

from collections.abc import Sequence

import torch

from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_tensors import HostMemory
from worker_proc.recurrent.state_spec import RecurrentSpec
from worker_proc.recurrent.step_texts import StepTexts, texts_of


class StatePool:
    """Tensors of states, `[block, *shape]`, and the texts of the present step."""

    def __init__(
        self,
        specs: Sequence[RecurrentSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
    ) -> None:
        """Map the memory; a block of a table stands for `block_size` tokens."""
        self._block_size = block_size
        self.memory: list[HostMemory] = []
        self.tensors: dict[str, list[torch.Tensor]] = {}
        """Of each module, by its name, in the order of its states."""
        for spec in specs:
            made = [
                HostMemory((num_blocks, *state.shape), state.dtype(dtype)) for state in spec.states
            ]
            self.memory += made
            self.tensors[spec.module_name] = [memory.tensor for memory in made]
        self.texts = StepTexts([])

    def texts_with(self, num_rows: int) -> StepTexts:
        """Return the texts of the present step, which has as many rows."""
        if num_rows != self.texts.num_rows:
            raise RuntimeError(f"{num_rows} rows in a step of {self.texts.num_rows}")
        return self.texts

    def begin_step(self, inputs: StepInputs) -> None:
        """Take the texts of a step; called once before its forward."""
        begun = inputs.begun_blocks
        if begun is None or not self.texts.move_on(begun):
            self.texts = texts_of(inputs, self._block_size)
