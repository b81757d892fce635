"""Weights in codes with groups of inputs, of several kinds and shapes."""

from typing import NamedTuple

import torch

from tests.worker.quantization.bitsandbytes_layouts import FP4, NF4
from worker_proc.quantization.weight import CodeKind, Multiples, QuantizedWeight

_SECTION_INPUTS = 256


class Case(NamedTuple):
    """A weight of some shape."""

    kind: CodeKind
    shape: tuple[int, int]
    group_size: int
    scales: torch.dtype = torch.float16
    has_zeros: bool = False
    has_order: bool = False
    has_minimums: bool = False
    has_multiples: bool = False
    """Scales and minimums are multiples of units, as in GGUF's K formats."""


CASES = (
    Case(CodeKind.INT4, (96, 128), 32, has_zeros=True),
    Case(CodeKind.INT4, (70, 200), 64, torch.bfloat16),
    Case(CodeKind.INT4, (160, 257), 128, has_zeros=True),
    Case(CodeKind.INT4, (34, 300), 300),
    Case(CodeKind.INT4, (64, 256), 64, has_zeros=True, has_order=True),
    Case(CodeKind.INT8, (70, 45), 45, torch.float32),
    Case(CodeKind.INT8, (96, 192), 64, has_zeros=True),
    Case(CodeKind.INT8, (64, 256), 32, torch.bfloat16, has_order=True),
    Case(CodeKind.INT4, (70, 200), 32, torch.float32, has_zeros=True),
    Case(CodeKind.INT4, (70, 200), 32, torch.bfloat16, has_zeros=True),
    Case(CodeKind.INT4, (96, 160), 32, has_minimums=True),
    Case(CodeKind.INT4, (70, 512), 32, has_minimums=True, has_multiples=True),
    Case(CodeKind.INT8, (96, 256), 16, has_multiples=True),
    Case(CodeKind.INT8, (70, 80), 16),
    Case(CodeKind.NF4, (96, 192), 64, torch.float32),
    Case(CodeKind.FP4, (70, 256), 32, torch.float32),
    Case(CodeKind.FP4, (70, 80), 16, torch.float32),
    Case(CodeKind.NF4, (34, 300), 300),
    Case(CodeKind.FP8, (70, 257), 257, torch.float32),
    Case(CodeKind.FP8, (160, 300), 128, torch.float32),
)


def make_weight(case: Case, seed: int = 0) -> QuantizedWeight:
    """Make codes of every value, with scales of both signs and many sizes."""
    generator = torch.Generator().manual_seed(seed + sum(case.shape))
    num_outputs, num_inputs = case.shape
    num_groups = -(-num_inputs // case.group_size)
    most = 2**case.kind.bits
    codes = torch.randint(0, most, case.shape, generator=generator, dtype=torch.uint8)
    if case.kind is CodeKind.FP8:
        codes[codes & 0x7F == 0x7F] = 1  # less than the normal numbers, instead of NaN
    scales = torch.randn(num_outputs, num_groups, generator=generator)
    scales *= torch.logspace(-4, 1, num_outputs).unsqueeze(1)
    zeros = torch.full((num_outputs, num_groups), most / 2)
    if case.has_zeros:
        zeros = torch.randint(0, most, zeros.shape, generator=generator).float()
    minimums = None
    if case.has_minimums:
        zeros.zero_()
        minimums = (scales * torch.randn(scales.shape, generator=generator)).to(case.scales).float()
    table = None
    if case.kind in (CodeKind.NF4, CodeKind.FP4):
        table = torch.tensor(NF4 if case.kind is CodeKind.NF4 else FP4)
    if case.kind is CodeKind.FP8 or table is not None:
        zeros.zero_()
    order = None
    if case.has_order:
        order = torch.randperm(num_inputs, generator=generator) // case.group_size
    rounded = scales.to(case.scales).float()
    weight = QuantizedWeight(
        *(case.kind, codes, rounded, zeros, case.group_size, order),
        minimums=minimums,
        table=table,
    )
    return _with_multiples(weight, generator) if case.has_multiples else weight


def _with_multiples(weight: QuantizedWeight, generator: torch.Generator) -> QuantizedWeight:
    """Replace the scales, and the minimums if there are any, by multiples of random units."""
    num_outputs, num_groups = weight.scales.shape
    num_sections = num_groups * weight.group_size // _SECTION_INPUTS

    def draw() -> Multiples:
        codes = torch.randint(
            -64, 64, (num_outputs, num_groups), generator=generator, dtype=torch.int8
        )
        return Multiples(codes, torch.rand(num_outputs, num_sections, generator=generator).half())

    scales = draw()
    weight = weight._replace(scales=scales.values(), scale_multiples=scales)
    if weight.minimums is None:
        return weight
    minimums = draw()
    return weight._replace(minimums=minimums.values(), minimum_multiples=minimums)
