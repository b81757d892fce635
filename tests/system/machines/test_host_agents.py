"""Host agents: engines of other machines that join, leave and die while requests run."""

from pathlib import Path

import pytest

from protocol.lifecycle import Role
from protocol.process.machines import members_file
from scripts.testing import EngineFactory, eventually
from tests.ports import free_port
from tests.system.machines.agents import FLAGS, Head, begin, kill_machine
from tests.system.machines.machine import Machine


@pytest.mark.parametrize("is_killed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_streams_continue_when_a_machine_dies_or_leaves_and_another_one_joins(
    is_killed: bool, start_engine: EngineFactory, keys: Path
) -> None:
    head = Head(start_engine, keys)
    one, other = head.agent("one"), head.agent("other")
    head.until_states("ready", "ready")
    load = begin(head.engine)
    if is_killed:
        kill_machine(one)
    else:
        one.process.terminate()
    third = head.agent("third")
    third.ready()
    load.check()
    if is_killed:
        start_engine.agent(head.address, keys, "--name", "one")
    else:
        assert one.process.wait(20) == 0
    eventually(lambda: head.engine.readiness()["replicas"].count("ready") >= 2, "it serves")
    load = begin(head.engine)
    kill_machine(other)
    load.check()


def test_agents_join_the_successor_of_the_head_with_their_engines_as_they_are(
    start_engine: EngineFactory, keys: Path
) -> None:
    head = Head(start_engine, keys)
    agents = [head.agent("one"), head.agent("other")]
    head.until_states("ready", "ready")
    begin(head.engine).check()
    pids = [agent.pid(Role.WORKER) for agent in agents]
    head.engine.process.kill()
    head.engine.process.wait()
    head.start()
    head.until_states("ready", "ready")
    begin(head.engine).check()
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
    load = begin(head.engine)
    newer = head.agent("one")
    assert older.process.wait(30) == 0
    load.check()
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
    load = begin(head)
    file.write_text(f"{machines[1].address}\n")
    load.check()
    eventually(lambda: f"has left: {machines[0].address}" in head.log, "the first has left")
    kill_machine(machines[0].engine)
    begin(head).check()


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
