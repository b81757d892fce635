"""Short chaos runs: real processes die in every way, and every failpoint is reached."""

import asyncio
import re
import tempfile
from pathlib import Path

import pytest

from protocol.lifecycle import Role
from protocol.process.failpoints import (
    FAILPOINTS,
    LOG_FILE,
    POISON_TOKEN_ID,
    REACHED_PREFIX,
    VARIABLE,
    arm,
)
from scripts.testing import EngineFactory, eventually
from tests.chaos import configurations, processes
from tests.chaos.__main__ import main
from tests.chaos.engine import Engine as ChaosEngine
from tests.chaos.faults import PARTS
from tests.system.null_adapters import write_null_adapter
from tests.system.recovery.test_supervisor import PROMPT, open_stream
from tests.system.shared_engines import EnginePool

PRESSURE = ("--num-gpu-blocks-override", "40", "--max-model-len", "512", "--null-step-ms", "5")
"""Two sequences of the greatest length do not fit."""


@pytest.fixture
def failpoints(start_engine: EngineFactory, tmp_path: Path) -> Path:
    """The directory of failpoints of all engines of the test."""
    start_engine.environ[VARIABLE] = str(tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[int]:
    """Return the numbers of the table's last row, from a run without violations."""
    status = main(arguments)
    captured = capsys.readouterr()
    assert status == 0, captured.out + captured.err
    *_, table_end = [line for line in captured.out.splitlines() if line.startswith("all ")]
    return [int(word) for word in table_end.split()[1:9]]


def test_short_run_finds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Worker, core and supervisor die at any time, and the exit status is 0."""
    arguments = ("--matrix", "--faults", "worker,core,supervisor", "--phases", "random")
    kills, streams, _, num_resumed, *harms = run(capsys, *arguments, "--streams", "8")
    assert kills >= 3
    assert streams >= 8 * 3
    assert num_resumed == 0
    assert harms == [0, 0, 0, 0]


def test_kills_at_a_steady_rate_change_no_stream(capsys: pytest.CaptureFixture[str]) -> None:
    """The engine has its default settings; each kill is of another process."""
    arguments = ("--every", "0.5", "--kills", "6", "--streams", "8")
    kills, streams, _, _, *harms = run(capsys, *arguments)
    assert kills == 6
    assert streams >= 16
    assert harms == [0, 0, 0, 0]


def test_clients_read_on_after_the_death_of_the_api(capsys: pytest.CaptureFixture[str]) -> None:
    """With a journal a stream does not end with its connection."""
    arguments = ("--journal", "--faults", "api", "--phases", "decode", "--kills", "1")
    kills, _, num_broken, num_resumed, *harms = run(capsys, *arguments, "--streams", "16")
    assert kills >= 1
    assert (num_broken, num_resumed > 0) == (0, True)
    assert harms == [0, 0, 0, 0]


def test_clients_that_come_back_too_late_have_lost_their_stream() -> None:
    """The checker finds lost streams: this engine keeps requests for no time."""
    arguments = ["--journal", "--faults", "api", "--phases", "decode", "--kills", "1"]
    assert main([*arguments, "--streams", "8", "--", "--resume-window-s", "0.000001"]) == 1


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("model", ["null", "demo"])
def test_whole_matrix(model: str, part: str) -> None:
    assert main(["--matrix", "--model", model, "--phases", ",".join(PARTS[part])]) == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("num_replicas", "num_streams"), [(2, 32), (4, 64)])
def test_matrix_of_replicas(num_replicas: int, num_streams: int, part: str) -> None:
    """Processes of one replica die, also for good, or the API that all have in common."""
    arguments = ("--replicas", str(num_replicas), "--streams", str(num_streams))
    cells = ("--faults", "worker,core,both,api,replica,lost", "--phases", ",".join(PARTS[part]))
    assert main(["--matrix", *arguments, *cells]) == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_matrix_of_ranks(dtype: str, part: str) -> None:
    """Each rank of a model dies in each phase."""
    flags = ("--tensor-parallel-size", "2", "--num-threads", "1", "--standby-workers", "1")
    cells = ("--faults", "worker", "--phases", ",".join(PARTS[part]))
    assert main(["--matrix", "--model", "demo", *cells, "--", *flags, "--dtype", dtype]) == 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_random_configurations() -> None:
    """Worker, core and API die in engines with several settings drawn at random."""
    assert configurations.main(["--count", "20"]) == 0


def test_whole_engine_is_found_without_asking_it() -> None:
    """All processes are found, dead or alive, and none after the end: orphans cannot hide."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as base:
        engine = ChaosEngine(Path(base), ["null", "--null-step-ms", "1"])
        try:
            engine.start()
            reply = asyncio.run(engine.ready())
            pids = {row.pid for row in reply.processes if row.pid is not None}
            assert len(pids) >= 4
            assert engine.living() >= pids
            assert processes.kill(engine.supervisor_pid) is not None
            engine.reap()
            eventually(lambda: not engine.living(), "all have left")
        finally:
            engine.close()


def test_every_failpoint_is_reached(start_engine: EngineFactory, failpoints: Path) -> None:
    """The engine is under memory pressure and its client leaves."""
    adapter = write_null_adapter(failpoints / "adapter", 1000)
    lora = ("--enable-lora", "--lora-modules", f"adapter={adapter}")
    engine = start_engine(*PRESSURE, *lora, "--standby-workers", "1")
    engine.ready()
    streams = [open_stream(engine, 500) for _ in range(4)]

    def reached() -> set[str]:
        files = failpoints.glob(f"{REACHED_PREFIX}*")
        return {file.name.removeprefix(REACHED_PREFIX) for file in files}

    eventually(lambda: "core.after_preemption" in reached(), "a request is preempted")
    for stream in streams:
        stream.close()
    engine.kill(Role.CORE)
    engine.post("/v1/completions", **{**PROMPT, "guided_regex": "[a-z]+"})
    engine.post("/v1/completions", **{**PROMPT, "prompt": [POISON_TOKEN_ID, 5]})
    engine.post("/v1/completions", **{**PROMPT, "model": "adapter"})
    engine.post("/tokenize", prompt="word " * 5000)
    eventually(lambda: reached() == set(FAILPOINTS), f"all but {set(FAILPOINTS) - reached()}")


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("worker.mid_step", Role.WORKER),
        ("core.before_reply", Role.CORE),
        ("worker.after_step", Role.WORKER),
    ],
)
@pytest.mark.parametrize("action", ["kill9", "exc"])
def test_death_at_a_failpoint_changes_no_answer(
    shared_engine: EnginePool, name: str, role: Role, action: str
) -> None:
    """The process dies of a signal or of an exception."""
    engine = shared_engine(has_failpoints=True)
    answer = engine.post("/v1/completions", **PROMPT)["choices"]
    before = engine.row(role)
    arm(engine.failpoints, name, f"{action}@2")
    assert engine.post("/v1/completions", **PROMPT)["choices"] == answer
    assert engine.row(role).epoch > before.epoch
    *_, fired = (engine.failpoints / LOG_FILE).read_text().splitlines()
    assert fired.split()[1:] == [name, str(before.pid), action]


def test_failpoints_given_as_a_list_hold_in_every_process(start_engine: EngineFactory) -> None:
    """Each worker dies in its fifth step, and streams advance nevertheless."""
    start_engine.environ[VARIABLE] = "worker.before_step=kill9@5"
    engine = start_engine()
    engine.ready()
    body = {**PROMPT, "max_tokens": 9, "ignore_eos": True}
    choice = engine.post("/v1/completions", **body)["choices"][0]
    assert choice["finish_reason"] == "length"
    assert engine.row(Role.WORKER).num_restarts >= 1


def test_without_the_variable_nothing_is_armed(shared_engine: EnginePool) -> None:
    """No setting of an engine can arm failpoints."""
    engine = shared_engine()
    for role in (Role.SUPERVISOR, Role.API, Role.CORE, Role.WORKER):
        environ = Path(f"/proc/{engine.pid(role)}/environ").read_bytes()
        assert VARIABLE.encode() not in environ


def test_other_servers_are_measured_by_the_same_client(
    start_engine: EngineFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an address and a kill command alone, it detects whether a server loses streams."""
    engine = start_engine("--null-step-ms", "3")
    arguments = ["--url", engine.url(), "--kills", "1", "--streams", "8", "--seed", "1"]
    arguments.append("--kill-command")
    assert main([*arguments, f"kill -9 {engine.pid(Role.WORKER)}"]) == 0
    assert "server  random" in capsys.readouterr().out
    assert main([*arguments, f"kill -9 {engine.pid(Role.API)}"]) == 1
    assert re.search(r"lost [a-z0-9-]+: cut", capsys.readouterr().out)
