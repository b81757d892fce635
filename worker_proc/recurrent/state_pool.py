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
    """Tensors of states, `[block, *shape]`, and the texts of the current step."""

    def __init__(
        self,
        specs: Sequence[RecurrentSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        num_swap_blocks: int = 0,
    ) -> None:
        """Map the memory; a block in a table covers `block_size` tokens.

        `num_swap_blocks` is the number of blocks for the states of swapped requests.
        """
        self._block_size = block_size
        self.memory: list[HostMemory] = []
        self.tensors: dict[str, list[torch.Tensor]] = {}
        """The tensors of each module, by name, in the order of its states."""
        self._pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Each tensor, and the tensor of the same states of swapped requests."""
        for spec in specs:
            made = self._map(spec, num_blocks, dtype)
            self.tensors[spec.module_name] = made
            if num_swap_blocks:
                self._pairs += zip(made, self._map(spec, num_swap_blocks, dtype), strict=True)
        self.texts = StepTexts([])

    @property
    def all_tensors(self) -> list[torch.Tensor]:
        """All tensors; each has a row for every block."""
        return [tensor for module in self.tensors.values() for tensor in module]

    def _map(self, spec: RecurrentSpec, num_blocks: int, dtype: torch.dtype) -> list[torch.Tensor]:
        made = [HostMemory((num_blocks, *state.shape), state.dtype(dtype)) for state in spec.states]
        self.memory += made
        return [memory.tensor for memory in made]

    def swap(self, out: BlockCopies, into: BlockCopies) -> None:
        """Copy the states of requests that are swapped out, then of those swapped in."""
        if out.host_block_ids:
            copy_by_index(self._pairs, out.device_block_ids, out.host_block_ids)
        if into.host_block_ids:
            pairs = [(kept, own) for own, kept in self._pairs]
            copy_by_index(pairs, into.host_block_ids, into.device_block_ids)

    def texts_with(self, num_rows: int) -> StepTexts:
        """Return the texts of the current step, which must have `num_rows` rows."""
        if num_rows != self.texts.num_rows:
            raise RuntimeError(f"{num_rows} rows in a step of {self.texts.num_rows}")
        return self.texts

    def begin_step(self, inputs: StepInputs) -> None:
        """Set the texts of a step; called once before its forward."""
        begun = inputs.begun_blocks
        if begun is None or not self.texts.move_on(begun):
            self.texts = texts_of(inputs, self._block_size)
