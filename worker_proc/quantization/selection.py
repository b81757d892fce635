"""Selects outputs or inputs of a weight in codes, for the ranks of a divided model."""

from collections.abc import Callable

import torch

from worker_proc.quantization.weight import CodeKind, Multiples, QuantizedWeight
from worker_proc.quantization.weight_files import CodedWeight


class SelectedWeight:
    """A part of a stored weight; the whole is read, and its other parts are freed at once."""

    def __init__(
        self,
        whole: CodedWeight,
        shape: tuple[int, int],
        select: Callable[[QuantizedWeight], QuantizedWeight],
    ) -> None:
        self.name = whole.name
        self.shape = torch.Size(shape)
        self.report = whole.report
        self._whole, self._select = whole, select

    @property
    def kind(self) -> CodeKind:
        return self._whole.kind

    @property
    def codes_rows(self) -> bool:
        return self._whole.codes_rows

    def read(self) -> QuantizedWeight:
        """Read the codes of the part, and their scales."""
        return self._select(self._whole.read())


def with_outputs(stored: CodedWeight, outputs: torch.Tensor) -> SelectedWeight:
    """Return the outputs with these numbers, in their order."""
    shape = len(outputs), stored.shape[1]
    return SelectedWeight(stored, shape, lambda weight: select_outputs(weight, outputs))


def with_inputs(stored: CodedWeight, inputs: range) -> SelectedWeight:
    """Return consecutive inputs."""
    shape = stored.shape[0], len(inputs)
    return SelectedWeight(stored, shape, lambda weight: select_inputs(weight, inputs))


def select_outputs(weight: QuantizedWeight, outputs: torch.Tensor) -> QuantizedWeight:
    """Return a weight with some outputs."""

    def rows(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values[outputs]

    def multiples(values: Multiples | None) -> Multiples | None:
        return None if values is None else Multiples(*(part[outputs] for part in values))

    return weight._replace(
        codes=weight.codes[outputs],
        scales=weight.scales[outputs],
        zeros=weight.zeros[outputs],
        minimums=rows(weight.minimums),
        scale_multiples=multiples(weight.scale_multiples),
        minimum_multiples=multiples(weight.minimum_multiples),
    )


def select_inputs(weight: QuantizedWeight, inputs: range) -> QuantizedWeight:
    """Return a weight with consecutive inputs, and with the groups that these belong to.

    If the inputs begin within a group, the group of each input is stated in `order`.
    """
    columns = slice(inputs.start, inputs.stop)
    groups, order = _group_of(weight)[columns].unique(return_inverse=True)
    is_consecutive = torch.equal(order, torch.arange(len(order)) // weight.group_size)
    minimums = weight.minimums
    weight = weight._replace(
        codes=weight.codes[:, columns].clone(),
        scales=weight.scales[:, groups],
        zeros=weight.zeros[:, groups],
        order=None if is_consecutive else order,
        minimums=None if minimums is None else minimums[:, groups],
    )
    scales, lows = weight.scale_multiples, weight.minimum_multiples
    return weight._replace(
        scale_multiples=None if scales is None else _groups_of(scales, groups),
        minimum_multiples=None if lows is None else _groups_of(lows, groups),
    )


def reorder_inputs(weight: QuantizedWeight, inputs: torch.Tensor) -> QuantizedWeight:
    """Return a weight with its inputs in another order, together with their groups.

    Numbers of groups stay multiples only if whole sections are moved.
    """
    groups = _group_of(weight)[inputs]
    firsts = groups[:: weight.group_size]
    is_whole = torch.equal(groups, firsts.repeat_interleave(weight.group_size)[: len(groups)])
    weight = weight._replace(codes=weight.codes[:, inputs])
    if not is_whole:
        return weight._replace(order=groups)
    scales, lows = weight.scale_multiples, weight.minimum_multiples
    return weight._replace(
        scales=weight.scales[:, firsts],
        zeros=weight.zeros[:, firsts],
        minimums=None if weight.minimums is None else weight.minimums[:, firsts],
        order=None,
        scale_multiples=None if scales is None else _sections_of(scales, firsts),
        minimum_multiples=None if lows is None else _sections_of(lows, firsts),
    )


def _sections_of(numbers: Multiples, groups: torch.Tensor) -> Multiples | None:
    """Return the numbers of groups in an order as multiples; None: sections are taken apart."""
    per_section = numbers.codes.shape[1] // numbers.units.shape[1]
    sections = groups[::per_section] // per_section
    starts = sections * per_section
    whole = starts.repeat_interleave(per_section) + torch.arange(len(groups)) % per_section
    if not torch.equal(groups, whole):
        return None
    return Multiples(numbers.codes[:, groups], numbers.units[:, sections])


def _group_of(weight: QuantizedWeight) -> torch.Tensor:
    """Return the group of each input, `[num_inputs]`."""
    if weight.order is not None:
        return weight.order
    num_inputs = weight.codes.shape[1]
    return torch.arange(num_inputs).div_(weight.group_size, rounding_mode="floor")


def _groups_of(numbers: Multiples, groups: torch.Tensor) -> Multiples | None:
    """Return the numbers of some groups as multiples; None: they are not whole sections."""
    per_section = numbers.codes.shape[1] // numbers.units.shape[1]
    first, count = int(groups[0]), len(groups)
    if first % per_section or count % per_section or int(groups[-1]) - first + 1 != count:
        return None
    sections = slice(first // per_section, (first + count) // per_section)
    return Multiples(numbers.codes[:, groups], numbers.units[:, sections])
