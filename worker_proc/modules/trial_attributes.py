"""Gives a module packed weights for a trial, and its own ones again if its results differ."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from worker_proc.modules.trial_errors import TRIAL_FAILURES
from worker_proc.recurrent.rowwise import compute_rowwise


def keeps_attributes(
    module: nn.Module, attributes: Mapping[str, Any], agrees: Callable[[], bool]
) -> bool:
    """Give a module attributes in place of its parameters of the same names, if `agrees()` then.

    Its elementwise functions are then computed row by row, too. Returns whether the module keeps
    them; otherwise, or if its code fails with them, it is as before.
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
