"""A fake core for each test, and shortened periods."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from protocol.client import async_client as client
from protocol.client import core_link
from tests.protocol.fake_core import FAST_TICK_S, FakeCore


@pytest.fixture
def core(tmp_path: Path) -> Iterator[FakeCore]:
    with FakeCore(str(tmp_path)) as fake:
        yield fake


@pytest.fixture
def fast_ticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the client's periods to a fiftieth."""
    monkeypatch.setattr(core_link, "TICK_S", FAST_TICK_S)
    monkeypatch.setattr(client, "TICK_S", FAST_TICK_S)
    monkeypatch.setattr(core_link, "STATUS_TIMEOUT_S", 5 * FAST_TICK_S)
    monkeypatch.setattr(core_link, "RELINK_TIMEOUT_S", 5 * FAST_TICK_S)


@pytest.fixture
def cores(tmp_path: Path) -> Iterator[list[FakeCore]]:
    """Two cores, each at a different address."""
    with ExitStack() as stack:
        dirs = [tmp_path / str(number) for number in range(2)]
        for each in dirs:
            each.mkdir()
        yield [stack.enter_context(FakeCore(str(each))) for each in dirs]
