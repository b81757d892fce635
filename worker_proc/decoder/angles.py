"""Tables of cosines and sines by position, computed once by the model's own module."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from worker_proc.loading.layer_executor import Angles

CHUNK = 4096
"""Number of positions that the module computes at a time. The chunks are the same at every start,
so that a position's angles always have the same bits."""
_NUM_TRIED = 19
"""Number of positions that a trial computes together; not a multiple of a vector's size."""

MakeAngles = Callable[[torch.Tensor], Angles]
"""Computes angles for positions, `[1, T]`."""


class AngleTable:
    """The angles of all positions requested so far, rounded up to a chunk."""

    def __init__(self, make: MakeAngles, limit: int) -> None:
        """`make` computes angles; `limit` is the number of positions that the model has."""
        self._make = make
        self._limit = limit
        self.num_positions = 0
        self.cosines = self.sines = torch.empty(0)
        """`[num_positions, num_rotated]` each."""
        self.reach(1)

    @torch.inference_mode()
    def reach(self, num_positions: int) -> None:
        """Extend the table to at least `num_positions`; its memory may move."""
        if num_positions > self._limit:
            raise ValueError(f"{num_positions} positions, and the model has {self._limit}")
        while self.num_positions < num_positions:
            first = self.num_positions
            end = min(first + CHUNK, self._limit)
            cosines, sines = self._make(torch.arange(first, end).unsqueeze(0))
            before = [] if first == 0 else [(self.cosines, self.sines)]
            parts = [*before, (cosines[0], sines[0])]
            self.cosines, self.sines = (torch.cat(part) for part in zip(*parts, strict=True))
            self.num_positions = end


class AngleCall:
    """A recorded call of a module that returned angles; it can be repeated for other positions."""

    def __init__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], positions: Any
    ) -> None:
        """Take the arguments of the call, which include the positions."""
        self._module = module
        self._args = args
        self._kwargs = kwargs
        self._positions = positions

    def __call__(self, positions: torch.Tensor) -> Angles:
        def replaced(value: Any) -> Any:
            return positions if _is_same(value, self._positions) else value

        args = [replaced(value) for value in self._args]
        kwargs = {name: replaced(value) for name, value in self._kwargs.items()}
        cosines, sines = self._module(*args, **kwargs)
        return cosines, sines

    @torch.inference_mode()
    def depends_on_positions_alone(self, limit: int) -> bool:
        """Return whether positions below `limit` have the same angles alone and with others."""
        firsts = torch.arange(min(_NUM_TRIED, limit))
        together = self(torch.cat([firsts, torch.tensor([limit - 1])]).unsqueeze(0))
        whole = self(torch.arange(min(CHUNK, limit)).unsqueeze(0))
        for position in firsts.tolist():
            alone = self(torch.tensor([[position]]))
            for one, *others in zip(alone, together, whole, strict=True):
                if not all(torch.equal(one[0, 0], other[0, position]) for other in others):
                    return False
        return True


def _is_same(value: Any, positions: torch.Tensor) -> bool:
    """Return whether an argument is the positions, or a view of them."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype == torch.long
        and value.data_ptr() == positions.data_ptr()
    )
