"""The command of a host agent: wrong arguments, and addresses."""

import os
from pathlib import Path

import pytest

from protocol.config import ConfigError, CpuPinning, WorkerConfig
from protocol.config.settings import configure
from protocol.lifecycle import Drain
from protocol.process.host_agents import REPEAT_S
from protocol.transport.curve import make_keys, read_client_keys
from scripts import agent
from scripts.supervisor import head_link
from scripts.supervisor.head_link import HeadLink
from scripts.supervisor.run_dirs import RunDir, holder_of


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--curve-keys", "keys"], "--join"),
        (["--join", "10.0.0.1:7100"], "--curve-keys"),
        (["--join", "10.0.0.1", "--curve-keys", "keys"], "--join 10.0.0.1 is not HOST:PORT"),
        (
            ["--join", "a:1", "--curve-keys", "keys", "--listen", "a:b"],
            "--listen a:b is not HOST or HOST:PORT",
        ),
        *[
            (["--join", join, "--curve-keys", "keys"], f"--join {join} is not HOST:PORT")
            for join in ("10.0.0.1:99999", "10.0.0.1:0", "ho!st:7100", "*:7100")
        ],
        *[
            (
                ["--join", "a:1", "--curve-keys", "keys", "--listen", listen],
                f"--listen {listen} is not HOST or HOST:PORT",
            )
            for listen in ("10.0.0.2:65536", "10.0.0.2:0", "ho!st")
        ],
        (["--join", "a:1", "--curve-keys", "keys", "--name", "a b"], "--name must be 1 to 128"),
        (
            ["--join", "a:1", "--curve-keys", "keys", "--leave-after-s", "0"],
            "--leave-after-s 0 must be greater than 0",
        ),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        agent.main(arguments, "agent")
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_an_address_for_all_is_reported_as_the_one_towards_the_other_machine() -> None:
    assert agent._addresses("0.0.0.0:7000", "127.0.0.1:1") == ("0.0.0.0:7000", "127.0.0.1:7000")
    assert agent._addresses("10.0.0.2:7000", "127.0.0.1:1") == ("10.0.0.2:7000", "10.0.0.2:7000")
    listen, seen_at = agent._addresses(None, "127.0.0.1:1")
    assert listen == seen_at
    assert listen.startswith("127.0.0.1:")


def test_an_agent_has_cpus_of_its_own_machine_for_each_rank() -> None:
    """Machines differ: what the engine joined has chosen for its own does not count."""
    asked = configure(model="null", tensor_parallel_size=2, cpu_pinning="auto")
    flags = ["--join", "a:1", "--curve-keys", "keys"]

    def worker_of(*cpus: str) -> WorkerConfig:
        arguments = agent._parse([*flags, *cpus], "agent")
        return agent._config_here(asked, "10.0.0.2:7000", arguments).worker

    assert worker_of() == asked.worker
    own = worker_of("--worker-cpus", "0-3:8")
    assert (own.worker_cpus, own.cpu_pinning) == ("0-3:8", CpuPinning.OFF)
    with pytest.raises(
        ConfigError, match="worker_cpus must have a list of CPUs for each worker: 2, not 1"
    ):
        worker_of("--worker-cpus", "0-3")


def test_an_agent_without_an_answer_gives_up_after_its_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_keys(tmp_path, ["api"])
    flags = ["--join", "127.0.0.1:9", "--curve-keys", str(tmp_path), "--leave-after-s", "0.2"]
    assert agent.main(flags, "agent") == 1
    assert "127.0.0.1:9 does not answer" in capsys.readouterr().err


def test_an_agent_whose_parent_has_gone_ends_while_nothing_answers(tmp_path: Path) -> None:
    make_keys(tmp_path, ["api"])
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    flags = ["--join", "127.0.0.1:9", "--curve-keys", str(tmp_path), "--parent-fd", str(read_fd)]
    try:
        assert agent.main(flags, "agent") == 0
    finally:
        os.close(read_fd)


def test_an_agent_has_its_run_directory_before_it_has_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_keys(tmp_path / "keys", ["api"])
    flags = ["--join", "127.0.0.1:9", "--curve-keys", str(tmp_path / "keys")]
    held = RunDir(str(tmp_path / "run"))
    assert agent.main([*flags, "--run-dir", held.path], "agent") == 1
    assert f"is in use by the supervisor with pid {os.getpid()}" in capsys.readouterr().err
    assert holder_of(held.path) == os.getpid()
    held.close(is_abandoned=False)
    assert agent.main([*flags, "--run-dir", held.path, "--leave-after-s", "0.1"], "agent") == 1
    assert holder_of(held.path) is None


def test_time_in_which_an_agent_did_not_look_is_not_the_silence_of_the_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent does not look while it fetches a model, or while it is stopped."""
    make_keys(tmp_path, ["api"])
    now = 1000.0
    monkeypatch.setattr(head_link.time, "monotonic", lambda: now)
    link = HeadLink("tcp://127.0.0.1:9", read_client_keys(tmp_path), "one", leave_after_s=3.0)
    try:
        now += 600.0
        assert link.commands() == []
        now += 600.0
        assert link.commands() == []
        for _ in range(2):
            now += REPEAT_S
            ends = link.commands()
        assert ends == [Drain()]
        now += REPEAT_S
        assert link.commands() == [], "once"
    finally:
        link.close(None)
