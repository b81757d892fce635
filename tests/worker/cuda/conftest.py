"""Settings for kernels that numpy interprets."""

from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture(autouse=True)
def _infinity_may_arise() -> Iterator[None]:
    """A GPU raises no error where an exponential is too large, as in a sigmoid."""
    with np.errstate(over="ignore"):
        yield
