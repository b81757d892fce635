"""Keeps a rank's outputs or inputs of matrices, in linear layers and in mixtures of experts."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from worker_proc.modules.experts.coded import is_transposed
from worker_proc.parallel.share import Section, Share


def matrix_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """Return a matrix, or those of all experts, `[..., outputs, inputs]`; None: there is none."""
    parent, _, last = name.rpartition(".")
    owner: Any = module
    for part in parent.split(".") if parent else []:
        owner = getattr(owner, part, None)
    found: Any = getattr(owner, last, None)
    if isinstance(found, nn.Parameter):
        return _as_stored(owner, found.detach())
    if type(found) not in (nn.Linear, Conv1D):
        return None
    weight: torch.Tensor = found.weight.detach()
    return weight.mT if type(found) is Conv1D else weight


def _as_stored(owner: Any, matrix: torch.Tensor) -> torch.Tensor:
    """Convert `[..., outputs, inputs]` to the layout of a module's experts, or back."""
    return matrix.mT if is_transposed(owner) else matrix


def fits(module: nn.Module, columns: dict[str, list[Section]]) -> bool:
    """Return whether each named matrix exists, and has the outputs of its sections."""
    return all(has_shape(module, name, outputs=parts) for name, parts in columns.items())


def has_shape(
    module: nn.Module,
    name: str,
    *,
    outputs: Sequence[Section] | None = None,
    inputs: Sequence[Section] | None = None,
) -> bool:
    """Return whether a matrix exists, and has the outputs and inputs of these sections."""
    matrix = matrix_of(module, name)
    if matrix is None:
        return False
    for parts, size in ((outputs, matrix.shape[-2]), (inputs, matrix.shape[-1])):
        if parts is not None and sum(part.num_units * part.unit for part in parts) != size:
            return False
    return True


def low_rank_terms(module: nn.Module, name: str, matrix: str) -> list[str]:
    """Return the last matrices of low-rank products that a module adds to the products of `matrix`.

    In Zamba2, several layers share a module, and the list `name` has a low-rank product for each of
    them; its other elements have no parameters. First matrices have few outputs, and stay whole.
    """
    terms: Any = getattr(module, name, None)
    if not isinstance(terms, nn.ModuleList):
        return []
    whole = matrix_of(module, matrix)
    found = []
    for place, term in enumerate(terms):
        if next(term.parameters(), None) is None:
            continue
        last = matrix_of(term, "1")
        if len(list(term.children())) != 2 or last is None or whole is None:
            return []
        if last.shape[-2] != whole.shape[-2]:
            return []
        found.append(f"{name}.{place}.1")
    return found


def keep_outputs(module: nn.Module, name: str, sections: Sequence[Section], share: Share) -> None:
    """Keep a rank's share of the outputs of each section, with their biases."""
    kept = kept_units(sections, share)
    outputs = torch.tensor(kept, dtype=torch.int64)  # there may be none
    matrix = matrix_of(module, name)
    assert matrix is not None
    _replace(module, name, matrix.index_select(-2, outputs))
    linear, bias = _bias_of(module, name)
    if isinstance(linear, nn.Linear):
        linear.out_features = len(kept)
    elif isinstance(linear, Conv1D):
        linear.nf = len(kept)
    if bias is not None:
        _set_bias(module, name, bias.index_select(-1, outputs))


def keep_channels(convolution: Any, sections: Sequence[Section], share: Share) -> None:
    """Keep a rank's share of the channels of each section of a depthwise convolution."""
    kept = torch.tensor(kept_units(sections, share))
    convolution.weight = parameter_of(convolution.weight.detach().index_select(0, kept))
    if convolution.bias is not None:
        convolution.bias = parameter_of(convolution.bias.detach().index_select(0, kept))
    convolution.in_channels = convolution.out_channels = convolution.groups = len(kept)


def keep_inputs(module: nn.Module, name: str, section: Section, share: Share) -> None:
    """Keep a rank's share of the inputs. Only rank 0 keeps the bias, since results are added up."""
    units = share.of(section.num_units)
    matrix = matrix_of(module, name)
    assert matrix is not None
    _replace(module, name, matrix[..., units.start * section.unit : units.stop * section.unit])
    linear, bias = _bias_of(module, name)
    if isinstance(linear, nn.Linear):
        linear.in_features = len(units) * section.unit
    elif isinstance(linear, Conv1D):
        linear.nx = len(units) * section.unit
    if bias is None or share.rank == 0:
        return
    if isinstance(linear, nn.Linear):
        linear.register_parameter("bias", None)
    else:
        _set_bias(module, name, torch.zeros_like(bias))


def kept_units(sections: Sequence[Section], share: Share) -> list[int]:
    """Return the indices of a rank's outputs or inputs, in order."""
    kept: list[int] = []
    first = 0
    for part in sections:
        units = share.of(part.num_units)
        kept += range(first + units.start * part.unit, first + units.stop * part.unit)
        first += part.num_units * part.unit
    return kept


def _replace(module: nn.Module, name: str, matrix: torch.Tensor) -> None:
    """Replace a matrix, `[..., outputs, inputs]`."""
    parent, _, last = name.rpartition(".")
    owner: Any = module.get_submodule(parent)
    found = getattr(owner, last)
    if isinstance(found, nn.Linear | Conv1D):
        stored = matrix.mT if isinstance(found, Conv1D) else matrix
        found.weight = parameter_of(stored)
    else:
        stored = _as_stored(owner, matrix)
        if is_transposed(owner):
            owner.is_transposed = True  # the shapes of divided parameters do not reveal it
        setattr(owner, last, parameter_of(stored))


def _bias_of(module: nn.Module, name: str) -> tuple[nn.Module | None, torch.Tensor | None]:
    """Return the linear layer that has a matrix, or None for experts, and the bias, or None."""
    parent, _, last = name.rpartition(".")
    owner = module.get_submodule(parent)
    found = getattr(owner, last)
    if isinstance(found, nn.Linear | Conv1D):
        return found, None if found.bias is None else found.bias.detach()
    bias = getattr(owner, f"{last}_bias", None)
    return None, None if bias is None else bias.detach()


def _set_bias(module: nn.Module, name: str, values: torch.Tensor) -> None:
    parent, _, last = name.rpartition(".")
    owner = module.get_submodule(parent)
    found = getattr(owner, last)
    if isinstance(found, nn.Linear | Conv1D):
        found.bias = parameter_of(values)
    else:
        setattr(owner, f"{last}_bias", parameter_of(values))


def parameter_of(values: torch.Tensor) -> nn.Parameter:
    """Return a parameter whose storage has only these values: a view is copied."""
    has_more = values.untyped_storage().nbytes() > values.numel() * values.element_size()
    if has_more or not values.is_contiguous():
        values = values.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(values, requires_grad=False)
