"""GPTQ checkpoints, as AutoGPTQ and GPTQModel write them.

A layer has `qweight`, int32 `[inputs * bits / 32, outputs]`, whose words hold consecutive inputs
from the lowest bits on; `qzeros`, int32 `[groups, outputs * bits / 32]`, whose words hold
consecutive outputs; `scales`, `[groups, outputs]`; and `g_idx`, int32 `[inputs]`, the group of
each input. In the first version of the format, a stored zero point is one less than the zero point.
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

GROUP_SIZES = (-1, 32, 64, 128)
PARTS = frozenset({"qzeros", "scales", "g_idx"})
"""The tensors of a layer next to its codes."""
_FORMAT_KEYS = ("checkpoint_format", "format")
"""The keys of the format's version in AutoGPTQ and GPTQModel; a checkpoint may have only one."""


class GptqScheme:
    """Whole numbers of 4 or 8 bits, packed along the inputs."""

    codes_rows = False

    def __init__(
        self, num_bits: int, group_size: int, zero_offset: int, *, has_order: bool
    ) -> None:
        """`has_order`: consecutive inputs may belong to any groups, which `g_idx` states."""
        self.kind = CodeKind.INT4 if num_bits == 4 else CodeKind.INT8
        self._num_bits = num_bits
        self._group_size = group_size
        self._zero_offset = zero_offset
        self._has_order = has_order and group_size != -1

    def shape(self, stored: Mapping[str, StoredTensor], read: ReadTensor) -> tuple[int, int]:
        num_words, num_outputs = require_matrix(stored, "qweight", "I32")
        per_word = 32 // self._num_bits
        num_inputs = num_words * per_word
        groups = num_groups(num_inputs, self._group_size)
        require(stored, "scales", (groups, num_outputs))
        require(stored, "qzeros", (groups, -(-num_outputs // per_word)))
        if self._has_order or "g_idx" in stored:
            require(stored, "g_idx", (num_inputs,))
        return num_outputs, num_inputs

    def read(self, tensors: Mapping[str, torch.Tensor]) -> QuantizedWeight:
        codes = unpack_int32(tensors["qweight"].t(), self._num_bits)
        scales = tensors["scales"].t().float().contiguous()
        zeros = unpack_int32(tensors["qzeros"], self._num_bits)[:, : len(codes)]
        zeros = (zeros + self._zero_offset) & (2**self._num_bits - 1)
        group_size = codes.shape[1] if self._group_size == -1 else self._group_size
        order = _order(tensors.get("g_idx"), group_size, scales.shape[1])
        zeros = zeros.t().float().contiguous()
        return checked(QuantizedWeight(self.kind, codes, scales, zeros, group_size, order))


def _order(g_idx: torch.Tensor | None, group_size: int, num_groups: int) -> torch.Tensor | None:
    """Return the group of each input, unless consecutive inputs are a group."""
    if g_idx is None:
        return None
    order = g_idx.long()
    if int(order.min()) < 0 or int(order.max()) >= num_groups:
        raise ValueError(f"has a g_idx outside of its {num_groups} groups")
    consecutive = torch.arange(len(order)) // group_size
    return None if torch.equal(order, consecutive) else order


def read_gptq(settings: Settings) -> CheckpointFormat:
    """Return the format that the settings describe."""
    common, rules = read_gptq_scheme(settings), read_dynamic(settings, read_gptq_scheme)
    return CheckpointFormat("gptq", ("qweight",), PARTS, scheme_by_rules(rules, common))


def read_gptq_scheme(settings: Settings) -> GptqScheme:
    """Return the scheme of all layers, or of some."""
    num_bits = settings.one_of("bits", (4, 8))
    group_size = settings.one_of("group_size", GROUP_SIZES, 128)
    settings.one_of("pack_dtype", ("int32",), "int32")
    settings.one_of("method", ("gptq",), "gptq")
    stated = [key for key in _FORMAT_KEYS if settings.get(key) is not None]
    versions = {settings.one_of(key, ("gptq", "gptq_v2")) for key in stated} or {"gptq"}
    if len(versions) > 1:
        raise settings.unsupported("format", "the value of checkpoint_format")
    zero_offset = int(versions == {"gptq"})
    has_order = settings.one_of("desc_act", (True, False), False)
    return GptqScheme(num_bits, group_size, zero_offset, has_order=has_order)
