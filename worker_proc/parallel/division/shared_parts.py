"""Keeps weights shared that belong to several modules of a model, when the modules are divided."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from worker_proc.errors import UnsupportedModel


class SharedParts:
    """The weights that several modules have, and a rank's part of each, which is made once."""

    def __init__(self, model: nn.Module) -> None:
        found = [one for _, one in model.named_parameters(remove_duplicate=False)]
        counts = Counter(map(id, found))
        self._whole = {id(one): one for one in found if counts[id(one)] > 1}
        self._parts: dict[int, nn.Parameter] = {}

    @contextmanager
    def kept(self, module: nn.Module) -> Iterator[nn.Module]:
        """Yield a module to be divided, and then replace its parts of shared weights.

        They become the parts that an earlier module has of the same weights. Raises
        UnsupportedModel if two modules divide a weight differently.
        """
        before = {
            name: id(one)
            for name, one in module.named_parameters(remove_duplicate=False)
            if id(one) in self._whole
        }
        yield module
        after = dict(module.named_parameters(remove_duplicate=False))
        for name in before.keys() & after.keys():
            part = self._parts.setdefault(before[name], after[name])
            if part.shape != after[name].shape:
                raise UnsupportedModel(
                    f"several modules have the weight {name}, and are not divided alike:"
                    f" {list(part.shape)} and {list(after[name].shape)}"
                )
            parent, _, last = name.rpartition(".")
            setattr(module.get_submodule(parent), last, part)
