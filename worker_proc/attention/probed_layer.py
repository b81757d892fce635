"""The attention layers of a model, as a forward on the meta device shows them (probe.py)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from worker_proc.kv.kv_groups import LayerSpec


class RowTerms(NamedTuple):
    """Score terms of a layer that are computed from rows; see score_terms.py."""

    num_distances: int = 0
    """The number of distances for which each query has biases; 0: no biases."""
    has_row_sinks: bool = False
    """True if each query has its own sinks."""
    has_key_biases: bool = False
    """True if keys have biases, in the last dimensions of their heads."""


NO_ROW_TERMS = RowTerms()


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """An attention call of the forward."""

    module_name: str
    spec: LayerSpec
    sinks: str | None = None
    """The name of the parameter that holds its sinks, one for each head."""
    biases: str | None = None
    """The name of the buffer that is added to scores, by head and key position."""
    bias_origin: int | None = None
    """The column of a row's own key in that buffer; see `PagedLayer`."""
    row_terms: RowTerms = NO_ROW_TERMS


def are_causal(layers: Sequence[ProbedLayer]) -> bool:
    """Return whether a token attends to preceding ones only; all layers have one direction."""
    return not layers or layers[0].spec.is_causal
