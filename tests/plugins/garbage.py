"""Exempts libraries and collected tests from garbage collections, as many tests start one."""

import gc
import sys
from collections.abc import Generator

import pytest

MANY_OBJECTS = 200_000
"""Fewer than those of the libraries; tests leave less than this behind."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Run no garbage collection meanwhile: the imports make a million objects, and no garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_unconfigure() -> None:
    """Let the interpreter collect Triton's objects at its end; nanobind reports those that live."""
    if "triton" in sys.modules:
        gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def _cheap_collections() -> None:
    """Exempt all objects again if a test of the previous file has called `gc.unfreeze`."""
    # `gc.get_freeze_count` would take as long as a collection of the frozen objects.
    if len(gc.get_objects(generation=2)) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()
