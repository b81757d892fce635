"""Chooses, among candidates for replacing a module, the one that agrees best with the module."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import nn

from worker_proc.loading.deferred_module import make_generator
from worker_proc.modules.trial_errors import greatest

NUM_TRIAL_ROWS = 5
TRIAL_SCALES = (0.01, 1.0, 30.0, 1e4)
MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.02, torch.float16: 0.003}
"""Relative to the largest value: allows another order of sums, and one rounding."""
Module = TypeVar("Module", bound=nn.Module)


def closest_candidate(
    module: nn.Module,
    size: int,
    candidates: Mapping[int, Callable[[], Module]],
    proven: int | None,
    *,
    num_rows: int = NUM_TRIAL_ROWS,
    quantile: float = 1.0,
) -> tuple[int, Module] | None:
    """Return the candidate that is closest to `module`, if it agrees at every scale.

    `proven` is the number of the candidate to return without a trial; None: all are tried.
    `quantile` is the share of rows whose error counts.
    """
    if proven is not None:
        return proven, candidates[proven]()
    parameter = next(module.parameters())
    dtype = parameter.dtype
    if parameter.is_meta:  # text does not reach it
        return None
    generator = make_generator(1)
    # Not centered at zero, so that a norm that subtracts the mean fails.
    rows = torch.randn(1, num_rows, size, generator=generator) + 1.0
    trials = [(rows * scale).to(parameter) for scale in TRIAL_SCALES]
    try:
        expected = [module(trial).float() for trial in trials]
    except (TypeError, AttributeError, RuntimeError):
        return None  # a module with another interface
    best, min_error = None, MAX_ERROR[dtype]
    for number, make in candidates.items():
        candidate = make()
        errors = [
            (candidate(trial).float() - want).abs().amax(dim=-1) / want.abs().max()
            for trial, want in zip(trials, expected, strict=True)
        ]
        error = greatest(float(row.quantile(quantile, interpolation="higher")) for row in errors)
        if error <= min_error:
            best, min_error = (number, candidate), error
    return best
