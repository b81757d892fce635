"""An engine that host agents join, and the load of its replicas."""

import os
import signal
from pathlib import Path

from scripts.testing import Engine, EngineFactory, eventually, is_alive
from tests.ports import free_port
from tests.system.null_load import NullLoad

NUM_STREAMS = 16
NUM_TOKENS = 200
FLAGS = ("--null-step-ms", "5", "--data-parallel-size", "0", "--routing-policy", "round_robin")


class Head:
    """An engine without a core, which agents join."""

    def __init__(
        self, start_engine: EngineFactory, keys: Path, *flags: str, model: str = "null"
    ) -> None:
        """Start it with flags that all agents get, too."""
        self._start_engine = start_engine
        self._keys = keys
        self._model, self._flags = model, flags
        self.address = f"127.0.0.1:{free_port()}"
        self.engine = self.start()

    def start(self, *flags: str) -> Engine:
        listen = ("--agents-listen", self.address, "--curve-keys", str(self._keys))
        flags = (*FLAGS, *listen, *self._flags, *flags)
        self.engine = self._start_engine(*flags, model=self._model)
        return self.engine

    def agent(self, name: str) -> Engine:
        return self._start_engine.agent(self.address, self._keys, "--name", name)

    def until_states(self, *wanted: str) -> None:
        """Wait until the replicas have these states."""

        def are_so() -> bool:
            states: list[str] = self.engine.readiness()["replicas"]
            return states == list(wanted)

        eventually(are_so, f"the replicas are {wanted}")


def begin(engine: Engine) -> NullLoad:
    """Start streams, and wait until all have begun."""
    return NullLoad(engine.url(), NUM_STREAMS, NUM_TOKENS).read(11)


def kill_machine(agent: Engine) -> None:
    """Kill all processes of a machine at once."""
    agent.status()
    pids = [*agent.all_pids]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    agent.process.wait()
    eventually(lambda: not any(map(is_alive, pids)), "the machine is gone")
