"""Packs linear layers whose outputs form groups with separate inputs (DeepSeek-V4).

Such a layer is a subclass of a linear layer with its own forward. The packed layer must reproduce
its results on rows of three scales.
"""

import ctypes

import torch
from torch import nn

from worker_proc.loading.deferred_module import make_generator
from worker_proc.modules.coded_weights import dequantize_weights
from worker_proc.modules.packed_linear import PackedLinear
from worker_proc.modules.trial_errors import TRIAL_FAILURES, TRIAL_SCALES, greatest, greatest_error
from worker_proc.native.instructions import projection
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary
from worker_proc.native.structures import BufferArgs, Kind, ProgramArgs, RunArgs

NUM_TRIAL_ROWS = 5
MAX_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.02}
"""Relative to the greatest value."""
_ROW_BYTES = 64
"""A group's inputs are read in whole cache lines."""


class GroupedLinear(PackedLinear):
    """Products of input groups, each with its own matrix."""

    def __init__(self, library: NativeLibrary, weight: torch.Tensor, num_groups: int) -> None:
        """Take a weight `[num_groups * outputs, inputs]`."""
        super().__init__(weight.shape[0], weight.shape[1], weight.dtype)
        self.num_groups, self.num_outputs = num_groups, len(weight) // num_groups
        groups = weight.detach().view(num_groups, self.num_outputs, self.in_features)
        self._library = library
        self._packed = library.packer.pack_experts(groups)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return `[..., num_groups, outputs]` for `[..., num_groups, inputs]`."""
        rows = hidden.reshape(-1, self.num_groups, self.in_features).contiguous()
        missing = -self.in_features % (_ROW_BYTES // rows.itemsize)
        if missing:
            rows = nn.functional.pad(rows, (0, missing))
        out = rows.new_empty(len(rows), self.num_groups, self.num_outputs)
        instruction = projection(
            self._packed,
            kind=Kind.PROJECT_HEADS,
            num_heads=self.num_groups,
            head_dim=rows.shape[2],
            target_dim=self.num_outputs,
            num_outputs=self.num_outputs,
        )
        buffers = (BufferArgs * 2)(
            *(BufferArgs(part.data_ptr(), part.stride(0) * part.itemsize) for part in (rows, out))
        )
        program = ProgramArgs(ctypes.addressof(instruction), 1, rows.dtype == torch.bfloat16)
        self._library.execute(program, RunArgs(ctypes.addressof(buffers), num_rows=len(rows)))
        return out.view(*hidden.shape[:-1], self.num_outputs)


@torch.inference_mode()
def pack_grouped_linears(model: nn.Module, library: NativeLibrary) -> None:
    """Replace grouped layers that are proven equivalent, freeing their weights."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear) and _num_groups(child):
                dequantize_weights([child], "its groups have a matrix each")
                packed = _proven(child, library)
                if packed is not None:
                    child._parameters.clear()
                    setattr(parent, name, packed)


def _num_groups(module: nn.Linear) -> int:
    """Return the number of groups of a linear layer with its own forward; 0: no groups."""
    number = getattr(module, "n_groups", 0)
    if not isinstance(number, int) or number == 0 or type(module).forward is nn.Linear.forward:
        return 0
    return 0 if module.bias is not None or module.weight.is_meta else number


def _proven(module: nn.Linear, library: NativeLibrary) -> GroupedLinear | None:
    number = _num_groups(module)
    if module.weight.dtype not in NATIVE_DTYPES or len(module.weight) % number:
        return None
    packed = GroupedLinear(library, module.weight, number)
    shape = 1, NUM_TRIAL_ROWS, number, module.in_features
    rows = torch.randn(shape, generator=make_generator(1))
    trials = [(rows * scale).to(module.weight.dtype) for scale in TRIAL_SCALES]
    try:
        pairs = [(packed(trial), module(trial)) for trial in trials]
    except TRIAL_FAILURES:
        return None  # it takes other arguments
    if any(found.shape != expected.shape for found, expected in pairs):
        return None
    error = greatest(greatest_error(one.float(), other.float()) for one, other in pairs)
    return packed if error <= MAX_ERROR[module.weight.dtype] else None
