"""Forks of a zygote share what checking the model has found, and nothing is checked twice."""

import os

import pytest

from worker_proc.calibration.exactness import Exactness
from worker_proc.startup.calibrate import Calibration
from worker_proc.startup.shared_model import SharedCalibration

FOUND = Calibration(Exactness(False, "the reason"), 2.5)


def in_fork(act: object) -> None:
    pid = os.fork()
    if pid == 0:
        assert callable(act)
        act()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_calibration_of_a_fork_is_known_to_its_siblings() -> None:
    """It holds for the same number of threads only: others may give rows other bits."""
    shared = SharedCalibration()
    assert shared.of(2) is None
    shared.keep(1, FOUND)
    assert shared.of(1) == FOUND
    assert shared.of(2) is None
    in_fork(lambda: shared.keep(2, FOUND))
    assert shared.of(2) == FOUND


def test_fork_that_dies_while_it_writes_leaves_nothing_half(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The length is written last."""
    shared = SharedCalibration()
    shared.keep(1, FOUND)
    monkeypatch.setattr(
        shared, "_write_length", lambda length, write=shared._write_length: write(0)
    )
    shared.keep(2, FOUND)
    assert shared.of(1) is None
    assert shared.of(2) is None


def test_reason_that_does_not_fit_is_found_again_by_each_fork() -> None:
    shared = SharedCalibration()
    shared.keep(2, Calibration(Exactness(False, "x" * 10_000), 0.0))
    assert shared.of(2) is None
