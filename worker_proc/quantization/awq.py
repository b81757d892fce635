"""AWQ checkpoints in the layout for matrix products ("gemm"), as AutoAWQ writes them.

A layer has `qweight`, int32 `[inputs, outputs / 8]`, `qzeros`, int32 `[groups, outputs / 8]`, and
`scales`, `[groups, outputs]`. A word has the codes of eight consecutive outputs, in the order of
`ORDER` from the lowest bits on.
"""

from collections.abc import Mapping

import torch

from worker_proc.quantization.headers import StoredTensor
from worker_proc.quantization.layer_rules import read_dynamic, scheme_by_rules
from worker_proc.quantization.scheme import (
    CheckpointFormat,
    ReadTensor,
    Settings,
    checked,
    num_groups,
    require,
    require_matrix,
)
from worker_proc.quantization.weight import CodeKind, QuantizedWeight, unpack_int32

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
GROUP_SIZES = (-1, 32, 64, 128)
PARTS = frozenset({"qzeros", "scales"})
"""The tensors of a layer next to its codes."""
_LAYOUT_KEYS = ("version", "format", "checkpoint_format")
"""The keys under which AutoAWQ and GPTQModel name the layout."""
_NUM_BITS = 4
_PER_WORD = 8


class AwqScheme:
    """Whole numbers of 4 bits, packed along the outputs."""

    kind = CodeKind.INT4
    codes_rows = False

    def __init__(self, group_size: int) -> None:
        self._group_size = group_size

    def shape(self, stored: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        num_inputs, num_words = require_matrix(stored, "qweight", "I32")
        groups = num_groups(num_inputs, self._group_size)
        require(stored, "scales", (groups, num_words * _PER_WORD))
        require(stored, "qzeros", (groups, num_words))
        return num_words * _PER_WORD, num_inputs

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        codes = _unpack(tensors["qweight"])
        zeros = _unpack(tensors["qzeros"]).float()
        scales = tensors["scales"].t().float().contiguous()
        group_size = codes.shape[1] if self._group_size == -1 else self._group_size
        return checked(QuantizedWeight(self.kind, codes, scales, zeros, group_size))


def _unpack(packed: torch.Tensor) -> torch.Tensor:
    """Return the codes of `[rows, words]` as `[outputs, rows]`."""
    words = unpack_int32(packed, _NUM_BITS).unflatten(1, (-1, _PER_WORD))
    in_order: torch.Tensor = words[:, :, [ORDER.index(output) for output in range(_PER_WORD)]]
    return in_order.flatten(1).t().contiguous()


def read_awq(settings: Settings) -> CheckpointFormat:
    """Return the format that the settings describe."""
    common, rules = read_awq_scheme(settings), read_dynamic(settings, read_awq_scheme)
    return CheckpointFormat("awq", ("qweight",), PARTS, scheme_by_rules(rules, common))


def read_awq_scheme(settings: Settings) -> AwqScheme:
    """Return the scheme of all layers, or of some."""
    settings.one_of("bits" if settings.get("bits") is not None else "w_bit", (_NUM_BITS,))
    key = "group_size" if settings.get("group_size") is not None else "q_group_size"
    group_size = settings.one_of(key, GROUP_SIZES)
    settings.one_of("method", ("awq",), "awq")
    for layout in _LAYOUT_KEYS:
        settings.one_of(layout, ("gemm", "GEMM"), "gemm")
    settings.one_of("zero_point", (True,), True)
    return AwqScheme(group_size)
