"""Whole engines, started as a user would."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.transport.curve import make_keys
from scripts.testing import engine, start_engine
from tests.system.shared_engines import EnginePool

__all__ = ["engine", "start_engine"]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A directory with the keys of a link between machines, and those of the client `api`."""
    make_keys(tmp_path / "keys", ["api"])
    return tmp_path / "keys"


@pytest.fixture(scope="session")
def engine_pool() -> Iterator[EnginePool]:
    """The engines of all tests of this process."""
    pool = EnginePool()
    yield pool
    pool.close()


@pytest.fixture
def shared_engine(engine_pool: EnginePool) -> Iterator[EnginePool]:
    """Call it with flags to get an engine that other tests have used before."""
    yield engine_pool
    engine_pool.settle()
