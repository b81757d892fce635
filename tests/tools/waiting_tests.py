"""Tests that exceed their timeouts. Only tests/test_timeouts.py runs them."""

import threading

import pytest


@pytest.mark.timeout(0.2)
def test_waits_in_python() -> None:
    threading.Event().wait()


@pytest.fixture
def waiting() -> None:
    threading.Event().wait()


@pytest.mark.timeout(0.2)
@pytest.mark.usefixtures("waiting")
def test_waits_in_a_fixture() -> None:
    """Its fixture waits."""


@pytest.mark.timeout(0.2)
def test_loops_in_c_code() -> None:
    """No signal is handled meanwhile."""
    sum(range(10**12))


def test_ends() -> None:
    """It runs after the others."""
