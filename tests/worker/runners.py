"""Runners of one loaded model, made one after the other with different settings."""

from collections.abc import Iterator, Sequence
from typing import cast

import torch

from protocol.config import EngineConfig
from worker_proc.drafting.draft_model import DraftModel
from worker_proc.model_runner import ModelRunner
from worker_proc.startup.calibrate import Calibration, calibrate
from worker_proc.startup.load_runner import build_runner, num_threads
from worker_proc.startup.prepare import prepare_model


def make_runners(configs: Sequence[EngineConfig]) -> Iterator[ModelRunner]:
    """Load the model of the first settings, and yield a runner for each of them.

    They may differ in the number of threads, for which the model is checked again, and of blocks.
    The next runner takes the model from the one before, which must not run any more.
    """
    torch.set_num_threads(num_threads(configs[0]))
    prepared = prepare_model(configs[0], _silent)
    calibrations: dict[int, Calibration] = {}
    for config in configs:
        number = num_threads(config)
        torch.set_num_threads(number)
        if number not in calibrations:
            calibrations[number] = calibrate(prepared, config, _silent)
        yield cast(ModelRunner, build_runner(prepared, config, calibrations[number], _silent))


def draft_model_of(runner: ModelRunner) -> DraftModel:
    """Return the draft model of a runner that has one."""
    drafter = runner._drafter
    assert drafter is not None
    assert drafter.model is not None
    return drafter.model


def _silent(phase: str, done: int, total: int) -> None:
    """Report no progress."""
