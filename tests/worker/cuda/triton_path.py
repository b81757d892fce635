"""Chooses between the Triton path and the plain one, whatever the device is."""

import pytest

from tests.worker.cuda.interpreter import DEVICE
from worker_proc.cuda import coverage
from worker_proc.startup import checks, parts, prepare


def set_uses_triton(patch: pytest.MonkeyPatch, answer: bool) -> None:
    """Let the parts of a runner be made as on a device that uses Triton, or as on another one."""
    for module in (coverage, parts, prepare):
        patch.setattr(module, "uses_triton", lambda _: answer)


def take_triton_path(patch: pytest.MonkeyPatch) -> None:
    """Let the CPU take the path of a GPU: with Triton's kernels instead of the native ones."""
    patch.setattr(prepare, "load_library", lambda: None)
    patch.setattr(checks, "start_building", lambda: None)
    patch.setattr(prepare, "can_pack", lambda *_: False)
    set_uses_triton(patch, True)


def take_cuda_path(patch: pytest.MonkeyPatch) -> None:
    """Without a GPU, let the CPU take the path of one."""
    if DEVICE.type == "cpu":
        take_triton_path(patch)
