"""Whole engines, started as a user would."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.lifecycle import ProcessState, Role
from protocol.process import failpoints
from scripts.testing import TIMEOUT_S, Engine, EngineFactory, engine, eventually, start_engine

__all__ = ["engine", "start_engine"]

ROOT = Path(__file__).resolve().parents[2]
MOST_KEPT = 2
"""Engines that stay alive between tests; those that were used last are kept."""


class SharedEngine(Engine):
    """An engine of several tests, whose log begins anew with each of them."""

    _log_start = 0

    @classmethod
    def start(
        cls, factory: EngineFactory, flags: tuple[str, ...], has_failpoints: bool
    ) -> "SharedEngine":
        """Start an engine in the directory of a factory; it is not ready yet."""
        environ, run_dir = dict(factory.environ), f"{factory.base}/0"
        if has_failpoints:
            environ[failpoints.VARIABLE] = f"{run_dir}.failpoints"
        os.mkdir(f"{run_dir}.failpoints")
        return cls(run_dir, ["null", "--port", "0", *flags], environ)

    @property
    def failpoints(self) -> Path:
        """The directory of its failpoints, which are off unless it was asked for with them."""
        return Path(f"{self.run_dir}.failpoints")

    @property
    def log(self) -> str:
        """The text that its processes have written since the test has begun."""
        return super().log[self._log_start :]

    def begin(self) -> None:
        """Wait until it is as after its start, for the next test: all ready, and without requests.

        Epochs and counters are greater. A TimeoutError or a RuntimeError: it cannot be used.
        """
        failpoints.disarm(self.failpoints)
        eventually(self._is_whole, "all processes are ready", TIMEOUT_S)
        if any(row.role is Role.API for row in self.ready().processes):
            eventually(lambda: self.get("/load")["server_load"] == 0, "no request is open")
        self._log_start = len(super().log)

    def _is_whole(self) -> bool:
        """Whether helpers and standbys are ready, too."""
        self.check()
        reply = self.status()
        return reply is not None and all(
            row.state is ProcessState.READY and row.pid is not None for row in reply.processes
        )


class EnginePool:
    """Engines with the null model that tests of one process share: one for a list of flags.

    A test may kill processes that are replaced. If it has ended the whole engine, or the engine
    does not recover, the next test gets another one.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[str, ...], bool], tuple[EngineFactory, SharedEngine]] = {}
        """The engine that was used last comes last."""

    def __call__(self, *flags: str, has_failpoints: bool = False) -> SharedEngine:
        """Return an engine with these flags that is ready and has no requests."""
        key = flags, has_failpoints
        if key in self._kept:
            _, engine = self._kept[key] = self._kept.pop(key)
            try:
                engine.begin()
                return engine
            except (TimeoutError, RuntimeError):
                self._end(key)
        factory = EngineFactory()
        engine = SharedEngine.start(factory, flags, has_failpoints)
        self._kept[key] = factory, engine
        while len(self._kept) > MOST_KEPT:
            self._end(next(iter(self._kept)))
        engine.ready()
        return engine

    def _end(self, key: tuple[tuple[str, ...], bool]) -> None:
        factory, engine = self._kept.pop(key)
        with factory:
            engine.close()

    def close(self) -> None:
        """End all engines."""
        for key in list(self._kept):
            self._end(key)


@pytest.fixture(scope="session")
def shared_engine() -> Iterator[EnginePool]:
    """Call it with flags to get an engine that other tests have used before."""
    pool = EnginePool()
    yield pool
    pool.close()
