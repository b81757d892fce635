"""The status command with supervisors that answer as a test states."""

import itertools
import json
import re
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from protocol.lifecycle import ProcessState, ProcessStatus, Role, StatusReply
from protocol.message import (
    HEADER_BYTES,
    NO_EPOCH,
    PROTOCOL_VERSION,
    ProtocolError,
    encode,
    pack_header,
)
from protocol.process.run_dir import lifecycle_address, replica_dir
from scripts import restart, status


def test_an_engine_whose_answer_cannot_be_read_is_one_of_the_choices(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def query(run_dir: str, timeout_s: float) -> StatusReply:
        if run_dir == "/run/other":
            raise ProtocolError("version 0 instead of 1")
        return StatusReply([], True, "http://127.0.0.1:8000")

    monkeypatch.setattr(status, "live_run_dirs", lambda: ["/run/other", "/run/own"])
    monkeypatch.setattr(status, "_query", query)
    assert status.main([]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "troika: several engines are running; choose one:",
        "  --run-dir /run/other",
        "  --run-dir /run/own   (http://127.0.0.1:8000/v1)",
    ]


def test_an_engine_without_an_api_is_shown_with_the_addresses_of_its_cores() -> None:
    cores = ["tcp://10.0.0.2:7000", "tcp://10.0.0.2:7001"]
    [_, line] = status.render(StatusReply([], True, None, None, cores), "/run/t").splitlines()
    assert line == "ready at tcp://10.0.0.2:7000, tcp://10.0.0.2:7001, run dir /run/t"


def test_what_processes_remark_is_shown() -> None:
    line = "replica 1 gets no requests: its model '/m' has weights a instead of b"
    reply = StatusReply([], True, None, remarks=[line])
    assert status.render(reply, "/run/t").splitlines()[1] == line


READY, STARTING = ProcessState.READY, ProcessState.STARTING


@pytest.mark.parametrize(
    ("states", "is_ready"),
    [
        ({"api": READY, "replica-0": READY, "replica-1": STARTING}, True),
        ({"api": READY, "replica-0": STARTING, "replica-1": STARTING}, False),
        ({"api": STARTING, "replica-0": READY, "replica-1": READY}, False),
        ({"api-0": READY, "api-1": STARTING, "core": READY, "worker": READY}, True),
        ({"api": READY, "core": READY, "worker": READY, "zygote": STARTING}, True),
        ({"api": READY, "core": READY, "worker-0": READY, "worker-1": STARTING}, False),
        ({"api": READY, "core": STARTING, "worker": READY}, False),
        ({"supervisor": ProcessState.DRAINING, "api": READY, "core": READY}, False),
        ({"api": READY}, True),
    ],
)
def test_ready_means_that_new_requests_are_served(
    states: dict[str, ProcessState], is_ready: bool
) -> None:
    """One of several replicas and one of several APIs are enough, as for /readyz."""
    rows = [
        ProcessStatus(Role(name.split("-")[0]), int(name[-1]) if name[-1].isdigit() else 0, *rest)
        for name, state in states.items()
        for rest in [(None, 1, state, 0, 0, name)]
    ]
    reply = StatusReply(rows, False, None)
    line = status.render(reply, "/run/t").splitlines()[-1]
    assert line == f"{'ready' if is_ready else 'not ready'}, run dir /run/t"
    assert status.as_dict(reply)["ready"] is is_ready


def test_a_replica_whose_own_processes_are_not_ready_does_not_serve() -> None:
    reply = StatusReply([row(Role.API, 0, 7), row(Role.REPLICA, 0, 8)], True, None)
    for is_ready in (True, False):
        inner = StatusReply([row(Role.CORE, 0, 9)], is_ready, None)
        assert status.is_ready(reply, {0: inner}) is is_ready
    assert status.is_ready(reply, {0: "its supervisor has not answered within 2 s"})


FORKING = """
import os, sys
body = os.urandom(2**26)
pid = os.fork()
if pid:
    print(pid, flush=True)
sys.stdin.read()
"""


def test_memory_that_forks_share_counts_once() -> None:
    """The fork has all pages of its parent, 64 MiB of them random."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", FORKING], **pipes) as parent:
        fork = int(parent.stdout.readline())
        row = ProcessStatus(Role.WORKER, 0, parent.pid, 1, ProcessState.READY, 0, 0, "worker")
        other = msgspec.structs.replace(row, role=Role.STANDBY, pid=fork)
        line = status.render(StatusReply([row, other], True, None), "/run/t").splitlines()[-2]
        parent.stdin.close()
    match = re.fullmatch(r"memory of all, shared pages once: (\d+) MiB", line)
    assert match is not None, line
    assert 64 <= int(match[1]) < 112
    assert "memory of all" not in status.render(StatusReply([row], True, None), "/run/t")


Answer = Callable[[int], list[bytes]]
"""Returns the header and the body of the answer with a number."""


def answer(reply: StatusReply) -> Answer:
    body = encode(reply)
    return lambda number: [pack_header(NO_EPOCH, number, body), body]


def of_another_version(number: int) -> list[bytes]:
    header = bytearray(pack_header(NO_EPOCH, number, b""))
    header[2] ^= 1
    fields = bytes(header[: HEADER_BYTES - 4])
    return [fields + zlib.crc32(fields).to_bytes(4, "little"), b""]


def of_another_shape(number: int) -> list[bytes]:
    body = encode(["StatusReply", 7])
    return [pack_header(NO_EPOCH, number, body), body]


@contextmanager
def supervisor(run_dir: str, make: Answer | None) -> Iterator[None]:
    """Answer every question in this way; None: never."""
    Path(run_dir).mkdir(parents=True)
    ends = threading.Event()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(lifecycle_address(run_dir))

    def serve() -> None:
        for number in itertools.count():
            while not socket.poll(20):
                if ends.is_set():
                    return
            peer = socket.recv_multipart()[0]
            if make is not None:
                socket.send_multipart([peer, *make(number)])

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    ends.set()
    thread.join()
    context.destroy(linger=0)


OTHER_VERSION = f"peer has protocol {PROTOCOL_VERSION ^ 1}, this program {PROTOCOL_VERSION}"
PROBLEMS: dict[str, tuple[Answer | None, str]] = {
    "silent": (None, "its supervisor has not answered within 0.5 s"),
    "version": (of_another_version, f"its answer cannot be read: {OTHER_VERSION}"),
    "shape": (of_another_shape, "its answer cannot be read: "),
    "garbage": (lambda _: [b"x" * 24, b"y"], "its answer cannot be read: a damaged message"),
}


def test_a_replica_without_a_readable_answer_has_a_line_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are shown, and are not waited for any longer."""
    run_dir = str(tmp_path)
    monkeypatch.setattr(status, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(status, "is_live", lambda _: True)
    well = StatusReply([row(Role.CORE, 0, 77)], True, "")
    makes = [answer(well), *(make for make, _ in PROBLEMS.values())]
    reply = StatusReply([row(Role.REPLICA, n, 10 + n) for n in range(len(makes))], True, "")
    with ExitStack() as stack:
        monkeypatch.setattr(status, "_query", lambda _: reply)
        for number, make in enumerate(makes):
            stack.enter_context(supervisor(replica_dir(run_dir, number), make))
        began = time.monotonic()
        assert status.main(["--run-dir", run_dir]) == 0
        assert time.monotonic() - began < 0.5 * len(PROBLEMS)
        shown = capsys.readouterr().out.splitlines()
        assert any(line.split()[:2] == ["core", "77"] for line in shown)
        for number, (_, text) in enumerate(PROBLEMS.values(), 1):
            assert any(line.startswith(f"replica-{number}: {text}") for line in shown)
        assert status.main(["--run-dir", run_dir, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["replicas"]
        assert found["0"]["processes"][0]["pid"] == 77
        for number, (_, text) in enumerate(PROBLEMS.values(), 1):
            assert found[str(number)]["error"].startswith(text)


def test_an_engine_of_another_version_has_a_line_with_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The status command prints it, and so does the one that restarts a process."""
    run_dir = str(tmp_path / "run")
    monkeypatch.setattr(status, "TIMEOUT_S", 0.5)
    monkeypatch.setattr(restart, "_ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr(status, "is_live", lambda _: True)
    with supervisor(run_dir, of_another_version):
        for main in (status.main, lambda flags: restart.main(["worker", *flags])):
            assert main(["--run-dir", run_dir]) == 1
            [line] = capsys.readouterr().err.splitlines()
            assert line.startswith("troika: ")
            assert line.endswith(f" cannot be read: {OTHER_VERSION}")


def row(role: Role, rank: int, pid: int) -> ProcessStatus:
    name = f"{role.value}-{rank}" if role is Role.REPLICA else role.value
    return ProcessStatus(role, rank, pid, 1, ProcessState.READY, 0, 0, name)
