"""Tries packed weights in a module, which gets its own weights back if its results differ."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from worker_proc.modules.trial_errors import TRIAL_FAILURES
from worker_proc.recurrent.rowwise import compute_rowwise


def keeps_attributes(
    module: nn.Module, attributes: Mapping[str, Any], agrees: Callable[[], bool]
) -> bool:
    """Replace a module's parameters by attributes of the same names, and try it by `agrees`.

    The module keeps them if `agrees()` is true; otherwise, or if its code fails with them, it is as
    before. With them, its elementwise functions are computed row by row, too. Returns whether it
    keeps them.
    """
    before = dict(module.__dict__)
    replaced = {
        name: module._parameters.pop(name) for name in attributes if name in module._parameters
    }
    module.__dict__.update(attributes)
    compute_rowwise(module)
    try:
        if agrees():
            return True
    except TRIAL_FAILURES:
        pass  # it uses a matrix in another operation
    module.__dict__.clear()
    module.__dict__.update(before)
    module._parameters.update(replaced)
    return False
