"""A core loop for the tests over real sockets."""

from collections.abc import Iterator

import pytest

from core_proc import loop
from tests.core.loop_bench import Bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(loop, "STATUS_INTERVAL_S", 0.1)
    with Bench() as running:
        yield running
