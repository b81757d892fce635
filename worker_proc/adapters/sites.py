"""The places in a model where an adapter may add a low-rank product: outputs of linear layers.

modules/adapted_modules.py finds them, and decoder/adapter_proof.py proves which take adapters.
"""

from collections.abc import Sequence
from typing import NamedTuple

_LAYERS = ".layers."


class Site(NamedTuple):
    """Outputs of a linear layer: all, or those of one of the projections that it holds together."""

    module: str
    """The layer's name in transformers' model."""
    num_inputs: int
    first_output: int
    num_outputs: int


class Sites:
    """All sites of a model, numbered."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.all = sites
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

    def allowed_names(self) -> list[str]:
        """Return the last parts of the names of modules that take adapters."""
        return sorted({self.all[number].module.rpartition(".")[2] for number in self.allowed})

    def num_values(self, rank: int) -> int:
        """Return the numbers in the matrices of an adapter of some rank at all allowed sites."""
        sites = [self.all[number] for number in self.allowed]
        return rank * sum(site.num_inputs + site.num_outputs for site in sites)


def _from_layer(module: str) -> str:
    return f".{module}".rpartition(_LAYERS)[2]
