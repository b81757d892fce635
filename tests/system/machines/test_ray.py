"""A Ray cluster of two machines, as Ray's own utility makes it on one: kills, scaling, no head."""

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.lifecycle import Role
from protocol.transport.curve import make_keys
from scripts.testing import Engine, EngineFactory, RunningEngine, eventually
from tests.ports import free_port
from tests.system.machines.agents import NUM_TOKENS, begin
from tests.system.null_load import NullLoad

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
cluster_utils = pytest.importorskip("ray.cluster_utils")
machine = pytest.importorskip("scripts.placement.machine")

START_S = 90.0
"""For an engine in the cluster: Ray starts a process before."""


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """Its machines have one CPU, or as many as the parameter."""
    head = {"num_cpus": 0, "include_dashboard": False}
    made = cluster_utils.Cluster(initialize_head=True, head_node_args=head)
    for _ in range(2):
        made.add_node(num_cpus=getattr(request, "param", 1))
    yield made
    made.shutdown()


class Served:
    """An engine whose replicas are in the cluster."""

    def __init__(self, start_engine: EngineFactory, tmp_path: Path, address: str, *flags: str):
        make_keys(tmp_path / "keys", ["api"])
        self.join = f"127.0.0.1:{free_port()}"
        flags = ("--ray", address, "--curve-keys", str(tmp_path / "keys"), *flags)
        flags = ("--null-step-ms", "5", "--agents-listen", self.join, *flags)
        flags = ("--routing-policy", "round_robin", *flags)
        self.engine: Engine = start_engine(*flags, timeout_s=START_S)

    def until_ready(self, number: int) -> None:
        """Wait until this number of replicas serves."""

        def are_ready() -> bool:
            states: list[str] = self.engine.readiness()["replicas"]
            return states.count("ready") == number

        eventually(are_ready, f"{number} replicas serve", START_S)

    def agents(self) -> dict[str, int]:
        """Return the supervisors of the engines in the cluster: run directories and pids."""
        found = {}
        command = ["pgrep", "-af", f"scripts.agent --join {self.join}"]
        text = subprocess.run(command, capture_output=True, text=True, check=False).stdout
        for line in text.splitlines():
            pid, _, rest = line.partition(" ")
            found[rest.rpartition(" ")[2]] = int(pid)
        return found

    def stop(self) -> None:
        """End it in order; nothing is left in the cluster."""
        self.engine.process.send_signal(signal.SIGTERM)
        self.engine.process.wait(30)
        eventually(lambda: not self.agents(), "no engine is left")


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants."""
    text = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    children = [int(child) for child in text.stdout.split()]
    os.kill(pid, signal.SIGKILL)
    for child in children:
        kill_tree(child)


def test_streams_continue_when_a_machine_of_the_cluster_dies(
    cluster: Any, start_engine: EngineFactory, tmp_path: Path
) -> None:
    served = Served(start_engine, tmp_path, cluster.address, "--replicas", "2")
    served.until_ready(2)
    load = begin(served.engine)
    lost = cluster.list_all_nodes()[1]
    before = served.agents()
    cluster.remove_node(lost, allow_graceful=False)  # its engine serves on, without Ray
    load.check()
    assert served.agents() == before
    load = begin(served.engine)
    names = [f"troika:{served.join}:{number}" for number in range(2)]
    run_dirs = {str(machine.run_dir_of(name, lost.node_id)) for name in names}
    [run_dir] = run_dirs & set(before)
    kill_tree(before.pop(run_dir))  # and now it does not
    load.check()
    cluster.add_node(num_cpus=1)
    served.until_ready(2)
    after = served.agents()
    assert before.items() <= after.items(), "the other one stays"
    assert run_dir not in after, "it is on another machine"
    begin(served.engine).check()
    served.stop()


def test_engines_come_and_go_with_the_load(
    cluster: Any, start_engine: EngineFactory, tmp_path: Path
) -> None:
    flags = ("--min-replicas", "1", "--max-replicas", "2", "--max-num-seqs", "2")
    flags = (*flags, "--grow-after-s", "0.5", "--shrink-after-s", "3")
    served = Served(start_engine, tmp_path, cluster.address, *flags)
    served.until_ready(1)
    load = NullLoad(served.engine.url(), 16, NUM_TOKENS)
    served.until_ready(2)
    more = begin_few(served.engine)
    load.check()
    more.check()
    served.until_ready(1)
    begin_few(served.engine).check()
    served.stop()


def begin_few(engine: Engine) -> NullLoad:
    """Start as many streams as one engine computes at a time."""
    return NullLoad(engine.url(), 2, NUM_TOKENS)


def test_engines_stay_when_the_placer_or_the_head_of_the_cluster_is_gone(
    cluster: Any, start_engine: EngineFactory, tmp_path: Path
) -> None:
    served = Served(start_engine, tmp_path, cluster.address, "--replicas", "2")
    served.until_ready(2)
    before = served.agents()
    load = begin(served.engine)
    served.engine.kill(Role.PLACER)
    load.check()
    served.engine.ready()  # the placer, too: it imports Ray first
    load = begin(served.engine)
    cluster.head_node.kill_gcs_server(check_alive=False)
    eventually(
        lambda: "the Ray cluster does not answer" in served.engine.log, "a line reports it", 60
    )
    load.check()
    begin(served.engine).check()
    assert served.agents() == before
    served.engine.process.send_signal(signal.SIGTERM)
    served.engine.process.wait(30)
    for pid in served.agents().values():  # the placer cannot end them
        os.kill(pid, signal.SIGTERM)
    eventually(lambda: not served.agents(), "no engine is left")


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_the_ranks_of_an_engine_have_one_machine_of_the_cluster(
    cluster: Any, start_engine: EngineFactory, tmp_path: Path
) -> None:
    """A rank dies, and then a machine: every stream goes on."""
    flags = ("--replicas", "2", "--tensor-parallel-size", "2")
    served = Served(start_engine, tmp_path, cluster.address, *flags)
    served.until_ready(2)
    load = begin(served.engine)
    [run_dir, other] = served.agents()
    engine = RunningEngine(run_dir)
    try:
        pids = [engine.pid(Role.WORKER, rank) for rank in range(2)]
        os.kill(pids[1], signal.SIGKILL)
        load.check()
        assert not {engine.pid(Role.WORKER, rank) for rank in range(2)} & set(pids)
    finally:
        engine.close()
    load = begin(served.engine)
    kill_tree(served.agents()[other])
    load.check()
    served.until_ready(2)
    served.stop()
