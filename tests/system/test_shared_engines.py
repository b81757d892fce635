"""A test after which a shared engine has not recovered fails, and no later test gets the engine."""

import os
import signal
from collections.abc import Iterator

import pytest

from protocol.client.sync_client import EngineClient
from protocol.lifecycle import Role
from protocol.sampling import SamplingParams
from scripts.testing import TIMEOUT_S, is_alive
from tests.system.shared_engines import EnginePool, SharedEngine

FLAGS = ("--no-api", "--null-step-ms", "10")


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    """A pool whose engines are not those of other tests."""
    made = EnginePool()
    yield made
    made.close()


def test_a_request_that_stays_open_is_an_error(pool: EnginePool) -> None:
    engine = pool(*FLAGS)
    pool.settle()  # its standby is ready, too
    assert pool(*FLAGS) is engine
    with EngineClient(engine.address) as client:
        client.wait_ready(TIMEOUT_S)
        next(client.submit([5], SamplingParams(max_tokens=8000)))
        with pytest.raises(TimeoutError, match="the shared engine has no request"):
            pool.settle(0.2)
    assert not any(map(is_alive, engine.all_pids))


def end(engine: SharedEngine) -> None:
    engine.process.kill()
    engine.process.wait(TIMEOUT_S)


@pytest.mark.slow
def test_the_end_of_an_engine_is_an_error_unless_it_is_expected(pool: EnginePool) -> None:
    """A process that was replaced is none."""
    engine = pool(*FLAGS)
    os.kill(engine.pid(Role.WORKER), signal.SIGKILL)
    pool.settle()
    assert pool(*FLAGS) is engine
    end(engine)
    with pytest.raises(RuntimeError, match="the engine has ended"):
        pool.settle()
    engine = pool(*FLAGS)
    engine.may_end = True
    end(engine)
    pool.settle()
    assert pool(*FLAGS) is not engine
