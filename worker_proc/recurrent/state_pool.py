"""The pool of state blocks: the states of texts in all recurrent modules of a model."""

from collections.abc import Sequence

import torch

from protocol.core_worker import BlockCopies
from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_pool import copy_by_index
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
        num_swap_blocks: int = 0,
    ) -> None:
        """Map the memory; a block of a table stands for `block_size` tokens.

        `num_swap_blocks`: blocks for the states of swapped requests.
        """
        self._block_size = block_size
        self.memory: list[HostMemory] = []
        self.tensors: dict[str, list[torch.Tensor]] = {}
        """Of each module, by its name, in the order of its states."""
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []  # with those of swapped requests
        for spec in specs:
            made = self._map(spec, num_blocks, dtype)
            self.tensors[spec.module_name] = made
            if num_swap_blocks:
                self._pairs += zip(made, self._map(spec, num_swap_blocks, dtype), strict=True)
        self.texts = StepTexts([])

    @property
    def all_tensors(self) -> list[torch.Tensor]:
        """The tensors that a block has a row in."""
        return [tensor for module in self.tensors.values() for tensor in module]

    def _map(self, spec: RecurrentSpec, num_blocks: int, dtype: torch.dtype) -> list[torch.Tensor]:
        made = [HostMemory((num_blocks, *state.shape), state.dtype(dtype)) for state in spec.states]
        self.memory += made
        return [memory.tensor for memory in made]

    def swap(self, out: BlockCopies, into: BlockCopies) -> None:
        """Copy states of requests that leave, then those of requests that come back."""
        if out.host_block_ids:
            copy_by_index(self._pairs, out.device_block_ids, out.host_block_ids)
        if into.host_block_ids:
            pairs = [(kept, own) for own, kept in self._pairs]
            copy_by_index(pairs, into.host_block_ids, into.device_block_ids)

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
