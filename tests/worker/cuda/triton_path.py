"""Chooses between the Triton path and the plain one, whatever the device is."""

import pytest

from worker_proc.cuda import coverage
from worker_proc.startup import parts, prepare


def set_uses_triton(patch: pytest.MonkeyPatch, answer: bool) -> None:
    """Let the parts of a runner be made as on a device that uses Triton, or as on another one."""
    for module in (coverage, parts, prepare):
        patch.setattr(module, "uses_triton", lambda _: answer)
