"""An engine that host agents join, and the streams of its replicas."""

import os
import signal
from pathlib import Path

from scripts.testing import Engine, EngineFactory, eventually, is_alive
from tests.ports import free_port
from tests.system.machines.replicated_streams import EXPECTED, PARAMS, prompt_of
from tests.system.null_load import Stream

NUM_STREAMS = 16
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


def begin(engine: Engine) -> list[Stream]:
    """Start streams, and wait until all have begun."""
    streams = [
        Stream(engine.url(), prompt=prompt_of(number), max_tokens=PARAMS.max_tokens, seed=1)
        for number in range(NUM_STREAMS)
    ]
    eventually(lambda: all(len(one.token_ids) > 10 for one in streams), "all have begun")
    return streams


def check(streams: list[Stream]) -> None:
    for number, stream in enumerate(streams):
        stream.join()
        assert stream.error is None
        assert stream.token_ids == EXPECTED[number]


def kill_machine(agent: Engine) -> None:
    """Kill all processes of a machine at once."""
    agent.status()
    pids = [*agent.all_pids]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    agent.process.wait()
    eventually(lambda: not any(map(is_alive, pids)), "the machine is gone")
