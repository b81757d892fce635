"""The places in a model where an adapter may add a low-rank product: outputs of linear layers.

modules/adapted_modules.py finds them, and decoder/adapter_proof.py proves which of them take
adapters.

With tensor parallelism, a rank has some of the inputs or outputs of a layer, and uses its part of
an adapter's matrices. With pipeline stages, it has the sites of its own layers, and leaves out the
matrices of other layers.
"""

from collections.abc import Sequence
from typing import NamedTuple

_LAYERS = ".layers."


class Span(NamedTuple):
    """A rank's range among the inputs or outputs of a layer."""

    first: int
    num_all: int
    """The number of the layer's inputs, or of the site's outputs, over all ranks."""
    num_own: int


class MatrixPart(NamedTuple):
    """A rank's part of a divided linear layer."""

    outputs: Sequence[Span] = ()
    """Its outputs of each site; empty: all."""
    inputs: Span | None = None
    """Its inputs; None: all."""


class Site(NamedTuple):
    """Outputs of a linear layer: all, or those of one of the projections that it merges."""

    module: str
    """The layer's name in transformers' model."""
    num_inputs: int
    first_output: int
    num_outputs: int
    inputs: Span
    outputs: Span


def whole_site(module: str, num_inputs: int, first_output: int, num_outputs: int) -> Site:
    """Return a site of a layer that is not divided among ranks."""
    spans = Span(0, num_inputs, num_inputs), Span(first_output, num_outputs, num_outputs)
    return Site(module, num_inputs, first_output, num_outputs, *spans)


class OtherStages(NamedTuple):
    """The layers of a model's other stages."""

    layers: Sequence[str] = ()
    """Names of decoder layers."""
    num_values: int = 0
    """Number of inputs and outputs of all their linear layers."""


class Sites:
    """All sites of a model or of a stage, numbered."""

    def __init__(self, sites: Sequence[Site], others: OtherStages | None = None) -> None:
        self.all = sites
        self._others = others or OtherStages()
        self.of_module: dict[str, list[int]] = {}
        for number, site in enumerate(sites):
            self.of_module.setdefault(site.module, []).append(number)
        self.allowed: set[int] = set()
        """The sites that are proven to take adapters."""
        self._by_layer: dict[str, str] = {}
        """Names by their part from the layer number on, which all classes of the model share.

        The name is empty if several modules have the same part.
        """
        for name in self.of_module:
            key = _from_layer(name)
            self._by_layer[key] = "" if key in self._by_layer else name

    def __len__(self) -> int:
        return len(self.all)

    def find(self, module: str) -> list[int]:
        """Return the sites of a linear layer, given its name in a PEFT file; empty: it has none."""
        numbers = self.of_module.get(module)
        if numbers is None and _LAYERS in f".{module}":
            numbers = self.of_module.get(self._by_layer.get(_from_layer(module), ""))
        numbers = numbers or []
        return numbers if self.allowed.issuperset(numbers) else []

    def is_elsewhere(self, module: str) -> bool:
        """Return whether a linear layer is in another stage, given its name in a PEFT file."""
        return any(
            module.startswith(f"{layer}.")
            or _from_layer(module).startswith(f"{_from_layer(layer)}.")
            for layer in self._others.layers
        )

    def allowed_names(self) -> list[str]:
        """Return the last parts of the names of modules that take adapters."""
        return sorted({self.all[number].module.rpartition(".")[2] for number in self.allowed})

    def num_values(self, rank: int) -> int:
        """Return the number of values in an adapter of rank `rank` at all allowed sites."""
        sites = [self.all[number] for number in self.allowed]
        return rank * sum(site.num_inputs + site.num_outputs for site in sites)

    def num_values_of_file(self, rank: int) -> int:
        """Return the most values in a file with such an adapter, for all ranks and stages."""
        sites = [self.all[number] for number in self.allowed]
        num_own = sum(site.inputs.num_all + site.outputs.num_all for site in sites)
        return rank * (num_own + self._others.num_values)


def _from_layer(module: str) -> str:
    return f".{module}".rpartition(_LAYERS)[2]
