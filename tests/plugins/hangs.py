"""Ends a test process that hangs in C code, where the timeout of a test has no effect."""

import faulthandler
import os
from collections.abc import Generator
from typing import Any

import pytest

GRACE_S = float(os.environ.get("PYTEST_HANG_GRACE_S", "60"))
"""How much longer than its timeout a test may hold the interpreter before its process ends."""

_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    """Keep the descriptor that pytest replaces during a test."""
    config.stash[_stderr] = os.dup(2)


@pytest.hookimpl(tryfirst=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> None:
    """Print the stacks of a process that hangs, and end it."""
    limit_s = settings.timeout + GRACE_S
    faulthandler.dump_traceback_later(limit_s, exit=True, file=item.config.stash[_stderr])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol() -> Generator[None, object, object]:
    """Let a process live on when its test has ended."""
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def pytest_enter_pdb() -> None:
    """Let a process live as long as it is debugged."""
    faulthandler.cancel_dump_traceback_later()
