"""The zygote can fork, its workers behave like others, and no process is left behind."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
import zmq

from protocol.config import EngineConfig
from protocol.config.settings import configure
from protocol.lifecycle import Fatal, Hello, Ready, Stop, decode_to_supervisor
from protocol.message import encode
from protocol.process.child_handle import ChildHandle
from protocol.process.fork_server import ForkServer, reap_unknown_children
from protocol.process.prctl import set_subreaper
from protocol.process.progress_page import ProgressPage
from protocol.process.run_dir import lifecycle_address
from protocol.process.zygote_link import Forked, ForkFailed, ForkWorker
from protocol.transport.channel import HighWaterMark, RouterChannel
from scripts.testing import eventually, is_alive
from tests.paths import ROOT
from worker_proc.startup.zygote import NotForkable, check_forkable

T = TypeVar("T")

START_TIMEOUT_S = 60.0
"""Importing torch may take long on a loaded machine."""

FORK = ForkWorker(epoch=2, is_standby=False, fd_names=["parent_fd"])


class Nursery:
    """A supervisor's sockets, without its policy."""

    def __init__(self, run_dir: str, model: str = "null") -> None:
        config = configure(model=model)
        run = msgspec.structs.replace(config.run, run_dir=run_dir)
        self.config: EngineConfig = msgspec.structs.replace(config, run=run)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.link = RouterChannel(
            self.context, lifecycle_address(run_dir), HighWaterMark.LIFECYCLE_LINK
        )
        self.older_children = frozenset(children())  # as multiprocessing's resource tracker
        self._page, page_fd = ProgressPage.create("zygote-of-test")
        self.server = ForkServer(self.config, epoch=1, progress_fd=page_fd)
        os.close(page_fd)
        self.from_workers: list[tuple[bytes, int, object]] = []
        self.from_zygote: list[object] = []

    def await_worker(self, kind: type[T], epoch: int) -> T:
        """Wait for a worker's message on the lifecycle link."""

        def find() -> T | None:
            for item in self.link.drain(16):
                body = decode_to_supervisor(item.body)
                self.from_workers.append((item.peer, item.header.epoch, body))
            found = [m for _, e, m in self.from_workers if e == epoch and isinstance(m, kind)]
            return found[0] if found else None

        return eventually(find, f"{kind.__name__} of epoch {epoch}")

    def await_zygote(self, kind: type[T]) -> T:
        """Wait for a message of the zygote, and remove it."""

        def find() -> T | None:
            self.from_zygote += self.server.receive()
            found = [message for message in self.from_zygote if isinstance(message, kind)]
            if found:
                self.from_zygote.remove(found[0])
            return found[0] if found else None

        return eventually(find, kind.__name__, START_TIMEOUT_S)

    def fork(self, epoch: int) -> ChildHandle:
        """Fork a worker and wait for its Ready."""
        self.server.fork(epoch, is_standby=False)
        child = self.server.claim(self.await_zygote(Forked))
        assert child.epoch == epoch
        self.await_worker(Ready, epoch)
        return child

    def peer(self, epoch: int) -> bytes:
        """The identity of a worker's connection."""
        return next(peer for peer, e, _ in self.from_workers if e == epoch)

    def close(self) -> None:
        """End the zygote."""
        self.server.child.stop(1.0)
        self.server.close()
        self._page.close()
        self.link.close()
        self.context.term()


@pytest.fixture
def run_dir() -> Iterator[str]:
    """A run directory whose name is short enough for sockets."""
    path = tempfile.mkdtemp(prefix="troika-")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def nursery(run_dir: str) -> Iterator[Nursery]:
    """A ready zygote of the null worker; this process reaps its workers."""
    set_subreaper(True)
    started = Nursery(run_dir)
    known = started.older_children
    try:
        started.await_zygote(Ready)
        yield started
    finally:
        started.close()
        eventually(
            lambda: (reap_unknown_children(known), known >= set(children()))[1], "no child is left"
        )
        set_subreaper(False)


def children() -> list[int]:
    """Return the pids of this process's children, dead ones included."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(pid) for pid in text.split()]


def num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def ends(child: ChildHandle, status: int) -> None:
    """Assert that a process dies with this status, and that it was reaped here."""
    assert child.wait(30.0) == status
    assert not Path(f"/proc/{child.pid}").exists()
    child.close()


def test_a_forked_worker_holds_nothing_of_the_zygotes_own(nursery: Nursery) -> None:
    """It lacks its progress page (it would look like the zygote), its pipe and its link."""
    worker = nursery.fork(2)

    def open_files(pid: int) -> set[str]:
        files = set()
        for path in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # an attempt to reach the absent core
                files.add(os.readlink(path))
        return files

    output = {os.readlink("/proc/self/fd/1"), os.readlink("/proc/self/fd/2"), os.devnull}
    # It reports a fork before it closes the descriptors that it has passed on.
    eventually(lambda: len(open_files(nursery.server.child.pid) - output) == 3, "three are open")
    own = open_files(nursery.server.child.pid) - output
    assert not own & open_files(worker.pid)
    assert "zygote-of-test" in Path(f"/proc/{nursery.server.child.pid}/maps").read_text()
    assert "zygote-of-test" not in Path(f"/proc/{worker.pid}/maps").read_text()
    worker.stop(5.0)


def test_forked_worker_is_a_child_like_any_other(nursery: Nursery) -> None:
    """It reports with its epoch, handles Stop, and its death by a signal is seen."""
    workers = [nursery.fork(epoch) for epoch in (5, 6)]
    ours = set(children()) - nursery.older_children
    assert ours == {nursery.server.child.pid, *(worker.pid for worker in workers)}
    assert nursery.await_worker(Hello, 5).pid == workers[0].pid
    assert os.getsid(workers[0].pid) == workers[0].pid
    nursery.link.send(nursery.peer(5), 5, encode(Stop()))
    ends(workers[0], 0)
    assert workers[1].poll() is None
    workers[1].kill()
    ends(workers[1], -signal.SIGKILL)


def test_zygote_stays_single_threaded(nursery: Nursery) -> None:
    """It does so before and after a fork; the worker has ZMQ's threads."""
    zygote = nursery.server.child.pid
    assert num_threads(zygote) == 1
    worker = nursery.fork(2)
    assert num_threads(zygote) == 1
    assert num_threads(worker.pid) > 1
    worker.stop(1.0)


def test_worker_outlives_its_zygote_but_not_its_parent_pipe(nursery: Nursery) -> None:
    """Only the supervisor holds the pipe's writing end: not the zygote, not other workers."""
    workers = [nursery.fork(epoch) for epoch in (2, 3)]
    nursery.server.child.kill()
    assert nursery.server.child.wait(30.0) == -signal.SIGKILL
    assert all(worker.poll() is None for worker in workers)
    for worker in workers:
        worker.release()
        ends(worker, 75)


def test_worker_that_was_given_up_ends_and_is_reaped(nursery: Nursery) -> None:
    """The zygote dies between the fork and its answer, so the parent does not know the worker."""
    nursery.server.fork(2, is_standby=False)
    forked = nursery.await_zygote(Forked)
    assert nursery.server.disown(2)
    assert not nursery.server.disown(2)
    known = frozenset({nursery.server.child.pid})
    # The process disappears with its last thread, which ends later than its first.
    eventually(
        lambda: (reap_unknown_children(known), not Path(f"/proc/{forked.pid}").exists())[1],
        "it is reaped",
    )


def test_known_dead_are_left_to_their_owners(nursery: Nursery) -> None:
    worker = nursery.fork(2)
    os.kill(worker.pid, signal.SIGKILL)
    eventually(lambda: not is_alive(worker.pid), "it is dead")
    reap_unknown_children(frozenset({worker.pid}))
    ends(worker, -signal.SIGKILL)


def test_fork_that_fails_is_reported(nursery: Nursery) -> None:
    """One descriptor is missing; the next fork works."""
    parent_read, parent_write = os.pipe()
    os.close(parent_write)
    nursery.server.link.send(
        msgspec.structs.replace(FORK, fd_names=["parent_fd", "other_fd"]), [parent_read]
    )
    os.close(parent_read)
    assert nursery.await_zygote(ForkFailed).epoch == FORK.epoch
    nursery.fork(3).stop(1.0)


def test_zygote_ends_with_its_supervisor(nursery: Nursery) -> None:
    """It sees EOF on the pipe or on the link."""
    nursery.server.child.release()
    assert nursery.server.child.wait(30.0) == 75


def test_model_that_cannot_be_loaded_is_reported(run_dir: str) -> None:
    """The report has the reason, and states that a retry would fail."""
    nursery = Nursery(run_dir, model="/nonexistent")
    try:
        fatal = nursery.await_zygote(Fatal)
        assert "/nonexistent holds no config.json" in fatal.error
        assert not fatal.retry
    finally:
        nursery.close()


def test_process_with_threads_is_not_forked() -> None:
    """The error names the threads."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with pytest.raises(NotForkable, match="started threads"):
            check_forkable()
    finally:
        done.set()
        thread.join()


COMPARE = """
import json, os, sys
from protocol.sampling import SamplingParams
from protocol.config.settings import configure
from tests.worker.driving import drive
from worker_proc.startup.start import load_to_fork, make_runner
from worker_proc.startup.zygote import check_forkable

def quiet(*_): pass

def tokens(runner):
    prompts = [[(i * 7 + j) % 500 + 5 for j in range(3 + 9 * i)] for i in range(8)]
    params = [
        SamplingParams(max_tokens=20, temperature=0.9 * (i % 2), seed=i, ignore_eos=True)
        for i in range(8)
    ]
    return drive(runner, prompts, params, max_num_batched_tokens=64).output_token_ids

config = configure(
    model="scripts/demo_model",
    dtype=sys.argv[1],
    quantization=sys.argv[2],
    num_gpu_blocks_override=200,
    num_threads=2,
)
make = load_to_fork(config, quiet)
check_forkable()
if os.fork() == 0:
    make(quiet)
    os._exit(0)
assert os.wait()[1] == 0
read_fd, write_fd = os.pipe()
if os.fork() == 0:
    phases = set()
    runner = make(lambda phase, *_: phases.add(phase))
    found = {"tokens": tokens(runner), "blocks": runner.facts.num_gpu_blocks}
    found["phases"], found["exact"] = sorted(phases), runner.facts.exact_resume
    found["decoder"] = runner.facts.decoder
    found["threads"] = len(os.listdir("/proc/self/task"))
    os.write(write_fd, json.dumps(found).encode())
    os._exit(0)
os.close(write_fd)
with os.fdopen(read_fd) as pipe:
    forked = json.load(pipe)
print(json.dumps({"forked": forked, "cold": tokens(make_runner(config, quiet))}))
"""


@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        *(("float32", "none"), ("bfloat16", "none")),
        *(("bfloat16", "w4a16"), ("bfloat16", "w8a8")),
        pytest.param("bfloat16", "w8a16", marks=pytest.mark.slow),
    ],
)
def test_forked_worker_computes_the_tokens_of_one_that_loaded_by_itself(
    dtype: str, quantization: str
) -> None:
    """One thread packs weights and several compute the same tokens, greedy and seeded.

    The second fork takes over what the first one has checked with as many threads.
    """
    done = subprocess.run(
        [sys.executable, "-c", COMPARE, dtype, quantization],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["forked"]["tokens"] == found["cold"]
    assert found["forked"]["blocks"] == 200
    assert found["forked"]["threads"] >= 2
    assert found["forked"]["phases"] == ["allocate_cache"]
    assert found["forked"]["exact"]
    assert found["forked"]["decoder"] == "native"
