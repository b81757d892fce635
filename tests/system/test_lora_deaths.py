"""Workers that are killed while they load an adapter: real processes, `kill -9`, every token."""

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from protocol.adapters import CONFIG_FILE, WEIGHTS_FILE, read_adapter
from protocol.lifecycle import Role
from scripts.testing import Engine, EngineFactory, eventually
from tests.system.null_load import Stream
from tests.system.test_lora import TARGETS, demo_model, greedy, have
from tests.worker.peft_adapters import write_adapter
from worker_proc.null_runner import next_token_id
from worker_proc.startup.start import NULL_EOS_TOKEN_ID, NULL_VOCAB_SIZE

LARGE_BYTES = 128 * 2**20
"""Of an adapter whose digest takes long enough to find its load in progress: 60 ms or more."""
NUM_TOKENS = 400
_FEW_LEFT = 100
"""Tokens that may be on their way to a stream when the worker is killed."""
MOST_DEATHS = 4
"""Workers that may be killed in a row in loads of one adapter, as docs/lora.md states."""


def write(directory: Path, num_bytes: int) -> Path:
    """Write an adapter that is good enough for the null model."""
    directory.mkdir()
    (directory / CONFIG_FILE).write_text('{"peft_type": "LORA", "r": 4, "target_modules": ["q"]}')
    with (directory / WEIGHTS_FILE).open("wb") as file:
        file.truncate(num_bytes)
    return directory


def expected(prompt: list[int], path: Path | None) -> list[int]:
    """Return the output of the null model for a prompt, with an adapter or without."""
    adapter_id = 0 if path is None else read_adapter("", str(path))[0].adapter_id
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(next_token_id(ids, NULL_VOCAB_SIZE, [NULL_EOS_TOKEN_ID], adapter_id=adapter_id))
    return ids[len(prompt) :]


class Streams:
    """Two streams for each of some adapters, and two without one."""

    def __init__(self, engine: Engine, adapters: list[Path]) -> None:
        self._expected: dict[Stream, list[int]] = {}
        self.of: dict[str, list[Stream]] = {}
        for path in (None, *adapters):
            name = "null" if path is None else path.name
            for number in range(2):
                prompt = [5 + number, 6, 7]
                body = {"model": name, "prompt": prompt, "max_tokens": NUM_TOKENS}
                stream = Stream(engine.url(), **body)
                self._expected[stream] = expected(prompt, path)
                self.of.setdefault(name, []).append(stream)

    def have_tokens(self) -> bool:
        return all(stream.token_ids for stream in self._expected)

    def check(self, *names: str) -> None:
        """Wait for the ends; each token has come once, and is the right one."""
        for name in names:
            for stream in self.of[name]:
                stream.join()
                assert stream.error is None
                assert stream.token_ids == self._expected[stream]
                assert stream.finish_reason == "length"


def is_reading(pid: int, path: Path) -> bool:
    """Whether a process has a file open."""
    try:
        fds = [entry.path for entry in os.scandir(f"/proc/{pid}/fd")]
    except OSError:  # the process is gone
        return False
    return any(_target(fd) == str(path) for fd in fds)


def _target(fd: str) -> str | None:
    """Return the file of a descriptor; None: it has been closed meanwhile."""
    with contextlib.suppress(OSError):
        return os.readlink(fd)
    return None


def has_stopped(pid: int) -> bool:
    """Whether SIGSTOP has reached all threads of a process."""
    texts = [Path(entry.path, "stat").read_text() for entry in os.scandir(f"/proc/{pid}/task")]
    return all(text.rpartition(")")[2].split()[0] == "T" for text in texts)


def find_pid(engine: Engine, role: Role) -> int | None:
    """Return the pid of a process, which may be starting."""
    status = engine.status()
    rows = () if status is None else status.processes
    return next((row.pid for row in rows if row.role is role), None)


def kill_in_load(engine: Engine, adapter: Path, not_pid: int, *, with_core: bool = False) -> int:
    """Kill a worker, another one than `not_pid`, during its load of an adapter; returns its pid.

    It is stopped first: its load has begun, and has not ended, if it is still reading then.
    """
    weights = adapter / WEIGHTS_FILE

    def find() -> int | None:
        pid = find_pid(engine, Role.WORKER)
        return None if pid == not_pid else pid

    pid = eventually(find, "there is another worker")
    eventually(lambda: is_reading(pid, weights), "the worker loads the adapter")
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: has_stopped(pid), "the worker has stopped")
    assert is_reading(pid, weights), "the load has ended before the worker could be killed"
    if with_core:
        os.kill(eventually(lambda: find_pid(engine, Role.CORE), "a core runs"), signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    return pid


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    scratch = tmp_path_factory.mktemp("adapters")
    return [write(scratch / "large", LARGE_BYTES), write(scratch / "small", 1000)]


@pytest.fixture(scope="module")
def engine(paths: list[Path]) -> Iterator[Engine]:
    with EngineFactory() as start:
        engine = start(
            *("--enable-lora", "--enable-admin-routes", "--null-step-ms", "3", "--max-loras", "2"),
            *("--lora-modules", *(f"{path.name}={path}" for path in paths)),
        )
        engine.ready()
        yield engine


def test_requests_survive_workers_that_are_killed_while_they_load(
    engine: Engine, paths: list[Path]
) -> None:
    """One fewer than would refuse the adapter: the first in a step, all others in loads."""
    streams = Streams(engine, paths)
    eventually(streams.have_tokens, "all streams have tokens")
    killed = engine.pid(Role.WORKER)
    os.kill(killed, signal.SIGKILL)
    for _ in range(MOST_DEATHS - 1):
        killed = kill_in_load(engine, paths[0], killed)
    streams.check("null", "large", "small")


def test_an_adapter_in_whose_loads_all_workers_are_killed_is_refused_until_it_is_loaded_again(
    engine: Engine, paths: list[Path]
) -> None:
    """Its requests get one error, and others go on.

    A death counts also if the core dies with its worker, and the core's successor refuses what it
    has refused.
    """
    streams = Streams(engine, paths)
    eventually(streams.have_tokens, "all streams have tokens")
    killed = engine.pid(Role.WORKER)
    os.kill(killed, signal.SIGKILL)
    # On a busy machine one may have ended before.
    unfinished = [s for s in streams.of["large"] if len(s.token_ids) < NUM_TOKENS - _FEW_LEFT]
    assert unfinished
    for number in range(MOST_DEATHS):
        killed = kill_in_load(engine, paths[0], killed, with_core=number == 1)
    reason = "adapter 'large': workers died when they loaded it"
    for stream in unfinished:
        assert reason in (stream.join().error or "")
    streams.check("null", "small")
    engine.kill(Role.CORE)
    for stream in Streams(engine, [paths[0]]).of["large"]:
        assert reason in (stream.join().error or "")
    body = {"lora_name": "large", "lora_path": str(paths[0]), "load_inplace": True}
    answer = httpx.post(f"{engine.url()}/v1/load_lora_adapter", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    Streams(engine, paths).check("null", "large", "small")


@pytest.mark.slow
def test_texts_of_a_model_are_exact_though_workers_are_killed_while_they_load(
    start_engine: EngineFactory, tmp_path: Path
) -> None:
    """With the standby and the zygote, which replace a worker within a fraction of a second."""
    model = demo_model()
    large = write_adapter(tmp_path / "large", model, TARGETS, rank=512, seed=1, strength=0.5)
    small = write_adapter(tmp_path / "small", model, TARGETS, rank=4, seed=2, strength=0.5)
    engine = start_engine(
        *("--enable-lora", "--max-loras", "2", "--max-lora-rank", "512"),
        *("--num-gpu-blocks-override", "1024"),
        *("--lora-modules", f"large={large}", f"small={small}"),
        model="demo",
    )
    engine.ready()
    names = ["demo", "large", "small"]
    undisturbed = {name: greedy(engine, name, num_tokens=200).join().token_ids for name in names}
    streams = {name: greedy(engine, name, num_tokens=200) for name in names}
    eventually(have(list(streams.values()), 10), "10 tokens have arrived")
    killed = engine.pid(Role.WORKER)
    os.kill(killed, signal.SIGKILL)
    for number in range(MOST_DEATHS - 1):
        killed = kill_in_load(engine, large, killed, with_core=number == 1)
    assert {name: stream.join().token_ids for name, stream in streams.items()} == undisturbed
    assert not any(stream.error for stream in streams.values())
