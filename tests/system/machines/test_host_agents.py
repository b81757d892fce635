"""Host agents: engines of other machines that join, leave and die while requests run."""

import os
import signal
from pathlib import Path

import pytest

from protocol.lifecycle import Role
from protocol.process.machines import members_file
from protocol.transport.curve import make_keys
from scripts.testing import Engine, EngineFactory, eventually, is_alive
from tests.system.machines.test_machines import Machine, free_port
from tests.system.machines.test_replicas import EXPECTED, PARAMS, prompt_of
from tests.system.null_load import Stream

NUM_STREAMS = 16
FLAGS = ("--null-step-ms", "5", "--data-parallel-size", "0", "--routing-policy", "round_robin")


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ["api"])
    return tmp_path / "keys"


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


@pytest.mark.parametrize("is_killed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_streams_continue_when_a_machine_dies_or_leaves_and_another_one_joins(
    is_killed: bool, start_engine: EngineFactory, keys: Path
) -> None:
    head = Head(start_engine, keys)
    one, other = head.agent("one"), head.agent("other")
    head.until_states("ready", "ready")
    streams = begin(head.engine)
    if is_killed:
        kill_machine(one)
    else:
        one.process.terminate()
    third = head.agent("third")
    third.ready()
    check(streams)
    if is_killed:
        start_engine.agent(head.address, keys, "--name", "one")
    else:
        assert one.process.wait(20) == 0
    eventually(lambda: head.engine.readiness()["replicas"].count("ready") >= 2, "it serves")
    streams = begin(head.engine)
    kill_machine(other)
    check(streams)


def test_agents_join_the_successor_of_the_head_with_their_engines_as_they_are(
    start_engine: EngineFactory, keys: Path
) -> None:
    head = Head(start_engine, keys)
    agents = [head.agent("one"), head.agent("other")]
    head.until_states("ready", "ready")
    check(begin(head.engine))
    pids = [agent.pid(Role.WORKER) for agent in agents]
    head.engine.process.kill()
    head.engine.process.wait()
    head.start()
    head.until_states("ready", "ready")
    check(begin(head.engine))
    assert [agent.pid(Role.WORKER) for agent in agents] == pids


@pytest.mark.slow
def test_an_agent_with_other_settings_leaves(start_engine: EngineFactory, keys: Path) -> None:
    head = Head(start_engine, keys)
    agent = head.agent("one")
    head.until_states("ready")
    head.engine.process.kill()
    head.engine.process.wait()
    head.start("--max-num-seqs", "7")
    assert agent.process.wait(30) == 0
    assert "other settings" in agent.log


@pytest.mark.slow
def test_of_two_agents_with_one_name_the_older_one_leaves(
    start_engine: EngineFactory, keys: Path
) -> None:
    head = Head(start_engine, keys)
    older = head.agent("one")
    head.until_states("ready")
    streams = begin(head.engine)
    newer = head.agent("one")
    assert older.process.wait(30) == 0
    check(streams)
    newer.ready()
    members = members_file(head.engine.run_dir)
    eventually(lambda: members.read_text().count("tcp://") == 1, "one of them is used")


def test_replicas_of_a_file_join_and_leave_while_requests_run(
    start_engine: EngineFactory, keys: Path, tmp_path: Path
) -> None:
    machines = [Machine(start_engine, keys) for _ in range(2)]
    for machine in machines:
        machine.engine.ready()
    file = tmp_path / "replicas"
    file.write_text(f"# the first machine\n{machines[0].address}\n")
    flags = ("--replica-file", str(file), "--curve-keys", str(keys))
    head = start_engine(*FLAGS, *flags)
    assert head.readiness()["replicas"] == ["ready"]
    streams = begin(head)
    file.write_text(f"{machines[1].address}\n")
    check(streams)
    eventually(lambda: f"has left: {machines[0].address}" in head.log, "the first has left")
    kill_machine(machines[0].engine)
    check(begin(head))


def test_without_rays_package_the_start_is_refused_with_a_sentence(
    start_engine: EngineFactory, keys: Path, tmp_path: Path
) -> None:
    hidden = tmp_path / "hidden" / "ray"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('hidden')")
    start_engine.environ["PYTHONPATH"] = f"{hidden.parent}:{start_engine.environ['PYTHONPATH']}"
    listen = ("--agents-listen", f"127.0.0.1:{free_port()}", "--curve-keys", str(keys))
    engine = start_engine("--ray", "auto", *listen)
    assert engine.process.wait(30) == 1
    assert "ray needs its package: pip install ray" in engine.log
