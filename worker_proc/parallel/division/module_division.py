"""The division of a module among ranks: its matrices, parameters, norms, sizes and states."""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from worker_proc.adapters.sites import MatrixPart, Span
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.parallel.division.gated_rank_norm import divide_gated_norm
from worker_proc.parallel.division.matrices import (
    keep_channels,
    keep_inputs,
    keep_outputs,
    kept_units,
    parameter_of,
)
from worker_proc.parallel.division.rank_norm import divide_norm
from worker_proc.parallel.share import Section, Share
from worker_proc.recurrent.state_spec import RecurrentSpec, StateSpec


@dataclass(frozen=True, slots=True)
class Division:
    """The parts of a module that are divided, by their names in the module.

    A matrix is a linear layer, or the parameter that has the matrices of all experts.
    """

    module_name: str
    columns: dict[str, list[Section]]
    """Matrices that are divided by outputs."""
    outs: dict[str, Section]
    """Matrices that are divided by inputs."""
    summed: str = ""
    """The part of the module whose outputs the ranks add up; "": the module itself."""
    summed_within: tuple[str, ...] = ()
    """Parts whose outputs the ranks add up within the module's computation."""
    by_head: dict[str, int] = field(default_factory=dict)
    """Parameters and buffers with a value or row for each head or channel, and the number of heads
    or channels: the first dimension of this size is divided."""
    made_by_head: dict[str, int] = field(default_factory=dict)
    """Methods that return a value for each head, and the number of heads."""
    spec: LayerSpec | None = None
    """The attention of all heads; None: the module is not an attention module."""
    norms: dict[str, Section] = field(default_factory=dict)
    """Norms that cover the queries or keys of all heads."""
    gated_norms: dict[str, Section] = field(default_factory=dict)
    """Norms of groups of heads, with gates."""
    channels: dict[str, list[Section]] = field(default_factory=dict)
    """Depthwise convolutions."""
    factors: dict[str, list[Section]] = field(default_factory=dict)
    """Buffers whose last dimension has a value for each output of a matrix."""
    counts: dict[str, list[Section]] = field(default_factory=dict)
    """Attributes that are numbers of outputs or heads; each rank has the number of its own."""
    state_dim: int = 0
    """The dimension of heads or channels in a state that is not a window."""
    has_state_of_head: bool = False
    """True if each head has a separate state, besides windows."""

    @property
    def summed_names(self) -> list[str]:
        """The names, in the model, of the modules whose outputs the ranks add up."""
        parts = (*self.summed_within, self.summed)
        return [f"{self.module_name}.{part}" if part else self.module_name for part in parts]

    def apply(self, module: nn.Module, share: Share) -> None:
        """Reduce the module to a rank's part."""
        for name, sections in self.columns.items():
            keep_outputs(module, name, sections, share)
        for name, section in self.outs.items():
            keep_inputs(module, name, section, share)
        for name, sections in self.channels.items():
            keep_channels(module.get_submodule(name), sections, share)
        for name, num_heads in self.by_head.items():
            _keep_heads(module, name, share.of(num_heads), num_heads)
        for name, num_heads in self.made_by_head.items():
            _make_heads(module, name, share.of(num_heads))
        for name, section in self.norms.items():
            own = share.of(section.num_units)
            places = slice(own.start * section.unit, own.stop * section.unit)
            setattr(module, name, divide_norm(getattr(module, name), places, share.num_ranks))
        for name, section in self.gated_norms.items():
            setattr(module, name, divide_gated_norm(getattr(module, name), section, share))
        for name, sections in self.factors.items():
            kept = torch.tensor(kept_units(sections, share))
            setattr(module, name, getattr(module, name).index_select(-1, kept))
        if self.spec is not None:
            _set_counts(module, divide_spec(self.spec, share))
        for name, sections in self.counts.items():
            owner, last = _owner(module, name)
            setattr(owner, last, len(kept_units(sections, share)))

    def divide_states(self, spec: RecurrentSpec, share: Share) -> RecurrentSpec:
        """Return the states of a rank: its channels of windows, and its heads of other states.

        All ranks have the whole window if it does not belong to a convolution.
        """
        if self.has_state_of_head:
            own = [state for state in spec.states if not state.is_window]
            kept = share.of(len(own))
            states = [self._divide_window(one, share) for one in spec.states if one.is_window]
            return replace(spec, states=(*states, *own[kept.start : kept.stop]))
        states = [
            self._divide_window(one, share) if one.is_window else self._divide_state(one, share)
            for one in spec.states
        ]
        return replace(spec, states=tuple(states))

    def _divide_window(self, window: StateSpec, share: Share) -> StateSpec:
        if not self.channels:
            return window
        [sections] = self.channels.values()
        return replace(window, shape=(window.shape[0], len(kept_units(sections, share))))

    def _divide_state(self, state: StateSpec, share: Share) -> StateSpec:
        shape = list(state.shape)
        shape[self.state_dim] //= share.num_ranks
        return replace(state, shape=tuple(shape))

    def parts(self, share: Share) -> Iterator[tuple[str, MatrixPart]]:
        """Yield the names of the divided matrices, and a rank's part of each."""
        for name, sections in self.columns.items():
            first, spans = 0, []
            for section in sections:
                spans.append(_span(section, share, first))
                first += section.num_units * section.unit
            yield f"{self.module_name}.{name}", MatrixPart(spans)
        for name, section in self.outs.items():
            yield f"{self.module_name}.{name}", MatrixPart(inputs=_span(section, share))


def _owner(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the submodule that has an attribute, and the attribute's name there."""
    parent, _, last = name.rpartition(".")
    return module.get_submodule(parent), last


def _keep_heads(module: nn.Module, name: str, kept: range, num_heads: int) -> None:
    """Keep the values of some heads in a parameter or buffer."""
    owner, last = _owner(module, name)
    values: torch.Tensor = getattr(owner, last)
    dim = values.shape.index(num_heads)
    part = values.narrow(dim, kept.start, len(kept)).clone()
    setattr(owner, last, parameter_of(part) if isinstance(values, nn.Parameter) else part)


def _make_heads(module: nn.Module, name: str, kept: range) -> None:
    """Make a method that returns a value for each head return the values of some heads."""
    made: torch.Tensor = getattr(module, name)()
    part = made[kept.start : kept.stop].clone()
    module.__dict__[name] = lambda *_: part


def divide_spec(spec: LayerSpec, share: Share) -> LayerSpec:
    """Return the attention of a rank's heads."""
    return replace(
        spec,
        num_heads=len(share.of(spec.num_heads)),
        num_kv_heads=len(share.of(spec.num_kv_heads)),
    )


def _span(section: Section, share: Share, first: int = 0) -> Span:
    own, unit = share.of(section.num_units), section.unit
    return Span(first + own.start * unit, section.num_units * unit, len(own) * unit)


def _set_counts(attention: nn.Module, spec: LayerSpec) -> None:
    """Set the counts that an attention module has as attributes or reads from its configuration."""
    counts = {
        "num_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "num_key_value_groups": spec.num_heads // spec.num_kv_heads,
        "split_size": spec.num_heads * spec.head_dim,
    }
    for name, value in counts.items():
        if hasattr(attention, name):
            setattr(attention, name, value)
    config: Any = copy.copy(attention.config)
    config.num_attention_heads = spec.num_heads
    config.num_key_value_heads = spec.num_kv_heads
    attention.config = config
