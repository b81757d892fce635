"""Tries whether a module gives a row the same bits among every number of rows."""

import torch
from torch import nn

from worker_proc.calibration.same_bits import have_same_bits

ROW_COUNTS = (1, 3, 17, 65)
"""The numbers of rows with which modules are tried."""


@torch.inference_mode()
def repeats_rows(module: nn.Module, args: tuple[torch.Tensor, ...], num_rows: int) -> bool:
    """Return whether repeated rows have the same bits as single ones."""
    once = args[0].shape[1]
    index = torch.arange(num_rows, device=args[0].device) % once
    want, got = module(*args), module(*(value.index_select(1, index) for value in args))
    wanted, found = (out if isinstance(out, tuple) else (out,) for out in (want, got))
    return all(
        _repeats_result(one, other, index, once) for one, other in zip(wanted, found, strict=True)
    )


def _repeats_result(one: torch.Tensor, other: torch.Tensor, index: torch.Tensor, once: int) -> bool:
    """Return whether a result for repeated rows repeats the result for single ones.

    The row dimension is the one whose size follows the number of rows. It is usually the second of
    three; the results of a router have no batch dimension before it, and some results have heads
    after it.
    """
    sizes = zip(one.shape, other.shape, strict=False)
    dim = next((dim for dim, pair in enumerate(sizes) if pair == (once, len(index))), None)
    repeated = one if dim is None else one.index_select(dim, index)
    return repeated.shape == other.shape and have_same_bits(repeated, other)
