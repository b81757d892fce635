"""The places in a model where an adapter may add a low-rank product: outputs of linear layers.

modules/adapted_modules.py finds them, and decoder/adapter_proof.py proves which take adapters.

Of a model in several ranks, a rank has some of the inputs or outputs of a layer, and uses its part
of an adapter's matrices. Of a model in stages, it has the sites of its own layers, and leaves out
the matrices of others.
"""

from collections.abc import Sequence
from typing import NamedTuple

_LAYERS = ".layers."


class Span(NamedTuple):
    """Where a rank's inputs or outputs of a layer begin among those of all ranks."""

    first: int
    num_all: int
    """Inputs of the layer, or outputs of the site, of all ranks together."""
    num_own: int


class MatrixPart(NamedTuple):
    """What a rank has of a divided linear layer."""

    outputs: Sequence[Span] = ()
    """Of each site; none: it has all."""
    inputs: Span | None = None
    """None: it has all."""


class Site(NamedTuple):
    """Outputs of a linear layer: all, or those of one of the projections that it holds together."""

    module: str
    """The layer's name in transformers' model."""
    num_inputs: int
    first_output: int
    num_outputs: int
    inputs: Span
    outputs: Span


def whole_site(module: str, num_inputs: int, first_output: int, num_outputs: int) -> Site:
    """Return a site of a layer that no ranks divide."""
    spans = Span(0, num_inputs, num_inputs), Span(first_output, num_outputs, num_outputs)
    return Site(module, num_inputs, first_output, num_outputs, *spans)


class OtherStages(NamedTuple):
    """What other stages of the model have."""

    layers: Sequence[str] = ()
    """Names of decoder layers."""
    num_values: int = 0
    """Inputs and outputs of all linear layers in them."""


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
        """Names from the number of their layer on, as other classes of the model have them."""
        for name in self.of_module:
            key = _from_layer(name)
            self._by_layer[key] = "" if key in self._by_layer else name  # "": it is ambiguous

    def __len__(self) -> int:
        return len(self.all)

    def find(self, module: str) -> list[int]:
        """Return the sites of a linear layer, as a PEFT file names it; none: it has none."""
        numbers = self.of_module.get(module)
        if numbers is None and _LAYERS in f".{module}":
            numbers = self.of_module.get(self._by_layer.get(_from_layer(module), ""))
        numbers = numbers or []
        return numbers if self.allowed.issuperset(numbers) else []

    def is_elsewhere(self, module: str) -> bool:
        """Return whether a linear layer, as a PEFT file names it, is in another stage."""
        return any(
            module.startswith(f"{layer}.")
            or _from_layer(module).startswith(f"{_from_layer(layer)}.")
            for layer in self._others.layers
        )

    def allowed_names(self) -> list[str]:
        """Return the last parts of the names of modules that take adapters."""
        return sorted({self.all[number].module.rpartition(".")[2] for number in self.allowed})

    def num_values(self, rank: int) -> int:
        """Return the numbers in the matrices of an adapter of some rank at all allowed sites."""
        sites = [self.all[number] for number in self.allowed]
        return rank * sum(site.num_inputs + site.num_outputs for site in sites)

    def num_values_of_file(self, rank: int) -> int:
        """Return the most numbers in a file with such an adapter, for all ranks and stages."""
        sites = [self.all[number] for number in self.allowed]
        num_own = sum(site.inputs.num_all + site.outputs.num_all for site in sites)
        return rank * (num_own + self._others.num_values)


def _from_layer(module: str) -> str:
    return f".{module}".rpartition(_LAYERS)[2]
