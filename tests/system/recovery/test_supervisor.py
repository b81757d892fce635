"""Engines of real processes with the null model: start, death, replacement and end."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from http.client import HTTPResponse
from pathlib import Path

import pytest
import zmq

from protocol.lifecycle import ProcessState, Role, StatusQuery
from protocol.message import encode
from protocol.process.run_dir import lifecycle_address, replica_dir
from protocol.transport.channel import DealerChannel, HighWaterMark
from scripts.supervisor.shutdown import STOP_GRACE_S
from scripts.testing import (
    TIMEOUT_S,
    Engine,
    EngineFactory,
    RunningEngine,
    eventually,
    is_alive,
)
from tests.paths import ROOT
from tests.system.shared_engines import EnginePool
from tests.timing import within

ROLES = [Role.WORKER, Role.CORE, Role.API]
PROMPT = {"model": "null", "prompt": [5, 6, 7], "max_tokens": 4}


def run_command(factory: EngineFactory, *command: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m ...` and wait for its end."""
    return subprocess.run(
        [sys.executable, "-m", *command],
        cwd=ROOT,
        env=factory.environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def open_stream(engine: Engine, num_tokens: int) -> HTTPResponse:
    """Start a streamed completion and read its first event."""
    body = {**PROMPT, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        engine.url() + "/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    response: HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    assert response.readline().startswith(b"data: ")
    return response


def test_serves_and_survives_the_death_of_each_process(shared_engine: EnginePool) -> None:
    """Each is replaced under a greater epoch; the others keep their pids; answers are the same."""
    engine = shared_engine()
    answer = engine.post("/v1/completions", **PROMPT)["choices"][0]["text"]
    for role in ROLES:
        num_restarts = engine.row(role).num_restarts
        others = {other: engine.pid(other) for other in ROLES if other is not role}
        highest = max(engine.row(other).epoch for other in ROLES)
        successor = engine.kill(role)
        assert successor.epoch > highest
        assert successor.num_restarts == num_restarts + 1
        assert {other: engine.pid(other) for other in others} == others
        assert engine.post("/v1/completions", **PROMPT)["choices"][0]["text"] == answer


def test_with_work_to_do_the_tenth_death_in_a_row_delays_a_stream_no_more_than_the_first(
    start_engine: EngineFactory,
) -> None:
    """Settings are the default. Pauses that doubled would last 6 s and more by then."""
    engine = start_engine("--null-step-ms", "10", "--standby-workers", "1")
    stalls = []
    with open_stream(engine, 8_000) as stream:
        for role in [Role.WORKER, Role.CORE] * 5:
            os.kill(engine.pid(role), signal.SIGKILL)
            killed_at = last = time.monotonic()
            longest, num_events = 0.0, 0
            while num_events < 20 or last - killed_at < 0.3:
                assert stream.readline()
                now = time.monotonic()
                longest, last, num_events = max(longest, now - last), now, num_events + 1
            stalls.append(longest)
    assert max(stalls) < 5.0, stalls


@pytest.mark.slow
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_stream_continues_although_the_run_directory_was_removed(
    start_engine: EngineFactory, is_whole: bool
) -> None:
    """Programs that clean up /tmp remove the directory, or only the old files in it."""
    engine = start_engine("--null-step-ms", "1", "--api-server-count", "2")
    with open_stream(engine, 4_000) as stream:
        before = sorted(os.listdir(engine.run_dir))
        if is_whole:
            shutil.rmtree(engine.run_dir)
        else:
            for name in before:
                os.unlink(f"{engine.run_dir}/{name}")
        sockets = {name for name in before if name.endswith(".sock") or name.startswith("api")}
        sockets.discard("api-counters")
        assert len(sockets) == 5

        def is_restored() -> bool:
            return os.path.isdir(engine.run_dir) and sockets <= set(os.listdir(engine.run_dir))

        eventually(is_restored, "the directory is restored")
        assert os.stat(engine.run_dir).st_mode & 0o777 == 0o700
        with contextlib.closing(RunningEngine(engine.run_dir)) as restored:
            for role in (Role.WORKER, Role.CORE, Role.WORKER):
                restored.kill(role)
        events = [line for line in stream.read().splitlines() if line]
    assert events[-1] == b"data: [DONE]"
    assert b'"finish_reason":"length"' in events[-2] + events[-3]
    engine.process.terminate()
    assert engine.process.wait(TIMEOUT_S) == 0, engine.log


@pytest.mark.slow
def test_replicas_continue_although_the_directory_of_their_engine_was_removed(
    start_engine: EngineFactory,
) -> None:
    """Theirs are in it; their supervisors wait for the one that makes it, without an error."""
    engine = start_engine("--null-step-ms", "1", "--data-parallel-size", "2")
    with open_stream(engine, 4_000) as stream:
        before = {str(path) for path in Path(engine.run_dir).rglob("*.sock")}
        assert len(before) == 7
        shutil.rmtree(engine.run_dir, ignore_errors=True)  # some files are made again meanwhile
        eventually(
            lambda: before <= {str(path) for path in Path(engine.run_dir).rglob("*.sock")},
            "the directories are restored",
        )
        for number in range(2):
            with contextlib.closing(RunningEngine(replica_dir(engine.run_dir, number))) as replica:
                replica.kill(Role.WORKER)
                replica.kill(Role.CORE)
        assert stream.read().rstrip().endswith(b"data: [DONE]")
    assert "cannot be made again" not in engine.log
    engine.process.terminate()
    assert engine.process.wait(TIMEOUT_S) == 0, engine.log


def test_sigterm_ends_everything_with_status_0(engine: Engine) -> None:
    """No process and no socket is left; a given run directory keeps its epoch."""
    engine.process.terminate()
    assert engine.process.wait(TIMEOUT_S) == 0, engine.log
    assert "Troika serves null at http://127.0.0.1:" in engine.log
    assert not any(map(is_alive, engine.all_pids))
    assert sorted(os.listdir(engine.run_dir)) == ["epoch", "supervisor.lock"]
    assert "Traceback" not in engine.log


def test_running_request_is_finished_before_the_end(start_engine: EngineFactory) -> None:
    """Ctrl-C drains: running requests are answered in full although their worker dies."""
    engine = start_engine("--null-step-ms", "10", "--hang-timeout-s", "60")
    with open_stream(engine, 60) as stream:
        worker = engine.pid(Role.WORKER)
        os.kill(worker, signal.SIGSTOP)  # so that the request cannot end before the signal
        engine.process.send_signal(signal.SIGINT)
        eventually(lambda: "finishing open requests" in engine.log, "draining has begun")
        os.kill(worker, signal.SIGKILL)
        events = [line for line in stream.read().splitlines() if line]
    assert events[-1] == b"data: [DONE]"
    assert b'"finish_reason":"length"' in events[-2] + events[-3]
    assert engine.process.wait(TIMEOUT_S) == 0, engine.log


def test_second_signal_does_not_wait_for_requests(start_engine: EngineFactory) -> None:
    """The engine ends at once, and the exit status is 1."""
    engine = start_engine("--null-step-ms", "200")
    with open_stream(engine, 1000):
        engine.process.terminate()

        def is_draining() -> bool:
            reply = engine.status()
            return reply is not None and any(
                row.role is Role.API and row.state is ProcessState.DRAINING
                for row in reply.processes
            )

        eventually(is_draining, "the API drains")
        engine.process.terminate()
        assert engine.process.wait(0.9 * STOP_GRACE_S) == 1
    assert not any(map(is_alive, engine.all_pids))


def test_killed_supervisor_leaves_no_process(start_engine: EngineFactory) -> None:
    """All children leave within 2 s."""

    def measure() -> dict[str, float]:
        engine = start_engine()
        children = {engine.pid(role) for role in ROLES}
        engine.process.kill()
        engine.process.wait(TIMEOUT_S)
        began = time.monotonic()
        eventually(lambda: not any(map(is_alive, children)), "children have left")
        return {"leaving_s": time.monotonic() - began}

    within(3, measure, leaving_s=2.0)


def test_only_the_supervisor_holds_the_pipes_its_death_would_close(
    shared_engine: EnginePool,
) -> None:
    """A child that inherited another's pipe would keep it alive, so none may hold a writing end."""
    engine = shared_engine()

    def written_pipes(pid: int) -> set[str]:
        held = set()
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                target = os.readlink(fd)
                info = Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text()
            except FileNotFoundError:  # it was closed meanwhile
                continue
            flags = info.split("flags:")[1].split()[0]
            if target.startswith("pipe:") and int(flags, 8) & os.O_ACCMODE == os.O_WRONLY:
                held.add(target)
        return held

    engine.kill(Role.CORE)
    assert len(written_pipes(engine.process.pid)) >= len(ROLES)
    for role in ROLES:
        assert not written_pipes(engine.pid(role)) & written_pipes(engine.process.pid)


def test_second_supervisor_needs_another_run_dir(start_engine: EngineFactory) -> None:
    """A directory has one supervisor; its successor continues its epochs."""
    first = start_engine("--no-api")
    highest = max(row.epoch for row in first.ready().processes)
    second = run_command(start_engine, "scripts.supervisor", "null", "--run-dir", first.run_dir)
    assert second.returncode == 1
    assert f"in use by the supervisor with pid {first.process.pid}" in second.stderr
    first.process.kill()
    first.process.wait(TIMEOUT_S)
    successor = start_engine("--no-api", run_dir=first.run_dir)
    epochs = [successor.row(role).epoch for role in (Role.WORKER, Role.CORE)]
    assert min(epochs) > highest


def test_the_status_command_finds_the_only_engine_and_describes_it(
    engine: Engine, start_engine: EngineFactory
) -> None:
    """It finds the only engine, has JSON with every field, and an error without an engine.

    Of two engines, which have their own processes and ports, one must be named.
    """
    done = run_command(start_engine, "scripts.status", "--json")
    status = json.loads(done.stdout)
    assert (status["ready"], status["url"], status["failure"]) == (True, engine.url(), None)
    rows = {row["role"]: row for row in status["processes"]}
    assert set(rows) == {"supervisor", "worker", "core", "standby_core", "api"}
    del rows["standby_core"]  # it may still be starting
    for role, row in rows.items():
        assert set(row) == {
            *("name", "role", "rank", "is_spare", "pid", "epoch", "state"),
            *("rss_bytes", "num_restarts"),
        }
        assert row["pid"] == engine.pid(Role(role))
        assert row["state"] == "ready"
        assert 5 * 2**20 < row["rss_bytes"] < 500 * 2**20
    table = run_command(start_engine, "scripts.status").stdout
    assert f"ready at {engine.url()}/v1" in table
    engines = [engine, start_engine()]
    assert len({each.url() for each in engines}) == 2
    unclear = run_command(start_engine, "scripts.status")
    assert unclear.returncode == 1
    for each in engines:
        assert f"--run-dir {each.run_dir}" in unclear.stderr
        clear = run_command(start_engine, "scripts.status", "--run-dir", each.run_dir, "--json")
        assert json.loads(clear.stdout)["url"] == each.url()
    for each in engines:
        each.process.terminate()
        each.process.wait(TIMEOUT_S)
    done = run_command(start_engine, "scripts.status")
    assert (done.returncode, done.stderr) == (1, "troika: no engine of this user is running\n")


def test_a_status_query_leaves_no_state(shared_engine: EnginePool) -> None:
    """Sequence numbers continue after the last forgotten peer, so no entry is kept for a peer."""
    engine = shared_engine()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    address = lifecycle_address(engine.run_dir)
    one, other = (DealerChannel(context, address, HighWaterMark.LIFECYCLE_LINK) for _ in range(2))
    seqs: list[int] = []
    for channel in (one, other, one):
        assert channel.socket.poll(TIMEOUT_S * 1000, zmq.POLLOUT)
        assert channel.send(0, encode(StatusQuery()))
        assert channel.socket.poll(TIMEOUT_S * 1000, zmq.POLLIN)
        (received,) = channel.drain(2)
        seqs.append(received.header.seq)
    assert seqs == [seqs[0], seqs[0] + 1, seqs[0] + 2]
    one.close()
    other.close()
    context.term()


def test_temporary_run_dir_disappears_with_its_engine(start_engine: EngineFactory) -> None:
    """An orderly end removes it; after SIGKILL the next supervisor of this user does."""
    register = Path(start_engine.base) / f"troika-{os.getuid()}"
    run_dirs = []
    for number in (signal.SIGTERM, signal.SIGKILL):
        victim = subprocess.Popen(
            [sys.executable, "-m", "scripts.supervisor", "null", "--no-api"],
            cwd=ROOT,
            env=start_engine.environ,
            stderr=subprocess.DEVNULL,
        )
        link = register / f"temporary-{victim.pid}"
        eventually(link.is_symlink, "it is registered")
        run_dirs.append(Path(os.readlink(link)))
        eventually((run_dirs[-1] / "core.sock").exists, "the core listens")
        victim.send_signal(number)
        victim.wait(TIMEOUT_S)
    assert [run_dir.exists() for run_dir in run_dirs] == [False, True]
    engine = start_engine("--no-api")
    engine.ready()
    assert not run_dirs[1].exists()
    assert [entry.name for entry in register.iterdir()] == [f"given-{engine.process.pid}"]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("/nonexistent", "model /nonexistent does not exist; give a checkpoint directory"),
        ("/proc", "model /proc has no config.json"),
    ],
)
def test_missing_model_is_named(start_engine: EngineFactory, model: str, problem: str) -> None:
    """The error comes before anything is started."""
    done = run_command(start_engine, "scripts.supervisor", "--model", model)
    assert done.returncode == 1
    assert done.stderr.startswith(f"troika: {problem}")


def test_unusable_checkpoint_ends_the_first_start(
    start_engine: EngineFactory, tmp_path: Path
) -> None:
    """A child's fatal error is printed last, and no process is left."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text("{")
    engine = start_engine(model=str(tmp_path))
    assert engine.process.wait(TIMEOUT_S) == 1
    assert "troika: api failed (tokenizer): cannot load the tokenizer" in engine.log
    assert engine.log.splitlines()[-1].startswith(("troika: ", "hint: "))


def test_port_in_use_is_named(start_engine: EngineFactory) -> None:
    """The error names the flags that help."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_command(start_engine, "scripts.supervisor", "null", "--port", port)
    assert done.returncode == 1
    assert f"cannot listen on host 127.0.0.1, port {port}: Address already in use" in done.stderr
    assert "--port" in done.stderr


def test_wrong_flag_names_flag_and_bound(start_engine: EngineFactory) -> None:
    """The error names flag and bound, and --help loads no heavy library."""
    done = run_command(start_engine, "scripts.supervisor", "null", "--block-size", "0")
    assert done.returncode == 2
    assert "--block-size: must be an integer >= 1" in done.stderr

    def show_help() -> dict[str, float]:
        started = time.monotonic()
        done = run_command(start_engine, "scripts.cli", "serve", "--help")
        assert "--max-num-seqs" in done.stdout
        return {"help_s": time.monotonic() - started}

    within(3, show_help, help_s=2.0)  # 0.1 s on an idle machine


def test_idle_engine_needs_no_cpu(engine: Engine) -> None:
    """API, core and worker together stay under 1 % of a core, and so does the supervisor."""

    def busy_s(pids: list[int]) -> float:
        stats = [s for pid in pids for s in Path(f"/proc/{pid}/task").glob("*/schedstat")]
        return sum(int(stat.read_text().split()[0]) for stat in stats) / 1e9

    engine.post("/v1/completions", **PROMPT)
    children, supervisor = [engine.pid(role) for role in ROLES], [engine.process.pid]

    def measure() -> dict[str, float]:
        before = busy_s(children), busy_s(supervisor)
        started = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            engine.process.wait(3.0)
        elapsed_s = time.monotonic() - started
        return {
            "children": (busy_s(children) - before[0]) / elapsed_s,
            "supervisor": (busy_s(supervisor) - before[1]) / elapsed_s,
        }

    within(3, measure, children=0.01, supervisor=0.002)
