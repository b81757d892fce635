"""Engines with the null model that the tests of one process share."""

import contextlib
import os
from pathlib import Path

from protocol.client.sync_client import EngineClient
from protocol.lifecycle import ProcessState, Role
from protocol.process import failpoints
from scripts.testing import TIMEOUT_S, Engine, EngineFactory, eventually

MAX_KEPT = 2
"""Engines that stay alive between tests; those that were used last are kept."""


class SharedEngine(Engine):
    """An engine of several tests, whose log begins anew with each of them."""

    may_end = False
    """Whether the current test ends the engine."""
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
        """Let the log begin anew, for the next test."""
        self.may_end = False
        self._log_start = len(super().log)

    def settle(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until it is as after its start: all processes are ready, and no request is open.

        Epochs and counters are greater. A TimeoutError or a RuntimeError: it has not recovered.
        """
        failpoints.disarm(self.failpoints)
        eventually(self._is_whole, "all processes of the shared engine are ready", timeout_s)
        eventually(self._has_idle_core, "the shared engine has no request and no block", timeout_s)
        if any(row.role is Role.API for row in self.ready().processes):
            eventually(self._has_idle_api, "the API of the shared engine has no request", timeout_s)

    def _is_whole(self) -> bool:
        """Whether helpers and standbys are ready, too."""
        self.check()
        reply = self.status()
        return reply is not None and all(
            row.state is ProcessState.READY and row.pid is not None for row in reply.processes
        )

    def _has_idle_core(self) -> bool:
        with EngineClient(self.address) as client:  # a new client gets the figures at once
            client.wait_ready(TIMEOUT_S)
            status = client.status
        assert status is not None
        stats = status.stats
        return not stats.num_running_reqs + stats.num_waiting_reqs + stats.kv_cache_usage

    def _has_idle_api(self) -> bool:
        load: int = self.get("/load")["server_load"]
        return load == 0


class EnginePool:
    """Engines with the null model that tests of one process share: one for a list of flags.

    A test may kill processes that are replaced. One that ends the whole engine sets `may_end`. The
    test after which an engine does not recover fails, and the next test gets another engine.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[tuple[str, ...], bool], tuple[EngineFactory, SharedEngine]] = {}
        """The engine that was used last comes last."""
        self._used: set[tuple[tuple[str, ...], bool]] = set()
        """The engines of the current test."""

    def __call__(self, *flags: str, has_failpoints: bool = False) -> SharedEngine:
        """Return an engine with these flags that is ready and has no requests."""
        key = flags, has_failpoints
        self._used.add(key)
        if key in self._kept:
            _, engine = self._kept[key] = self._kept.pop(key)
        else:
            factory = EngineFactory()
            engine = SharedEngine.start(factory, flags, has_failpoints)
            self._kept[key] = factory, engine
            while len(self._kept) > MAX_KEPT:
                self._end(next(iter(self._kept)))
        engine.ready()
        engine.begin()
        return engine

    def settle(self, timeout_s: float = TIMEOUT_S) -> None:
        """Make the engines of a test ready for the next one, as `SharedEngine.settle`.

        Those that have not recovered are ended, and the error of one of them is raised.
        """
        with contextlib.ExitStack() as stack:
            for key in self._used & self._kept.keys():
                stack.callback(self._settle_one, key, timeout_s)
            self._used.clear()

    def _settle_one(self, key: tuple[tuple[str, ...], bool], timeout_s: float) -> None:
        _, engine = self._kept[key]
        if engine.may_end and engine.process.poll() is not None:
            self._end(key)
            return
        try:
            engine.settle(timeout_s)
        except BaseException:
            self._end(key)
            raise

    def _end(self, key: tuple[tuple[str, ...], bool]) -> None:
        factory, engine = self._kept.pop(key)
        with factory:
            engine.close()

    def close(self) -> None:
        """End all engines."""
        for key in list(self._kept):
            self._end(key)
