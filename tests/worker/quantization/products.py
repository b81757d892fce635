"""Products with packed weights, and numbers of rows for which kernels differ."""

import torch

from worker_proc.native.instructions import projection
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import PackedWeight
from worker_proc.native.structures import Activation, Epilogue

MAX_ROWS = 40
NUM_MANY_ROWS = (64, 127, 128, 129, 300)


def product(
    library: NativeLibrary, packed: PackedWeight, rows: torch.Tensor, *, gates: bool = False
) -> torch.Tensor:
    """Compute a projection; with `gates` also the activation."""
    if not gates:
        return library.project(projection(packed), rows, packed.num_outputs)
    instruction = projection(packed, epilogue=Epilogue.ACTIVATE, activation=Activation.SILU)
    return library.project(instruction, rows, packed.num_outputs // 2)
