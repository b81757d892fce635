"""Workers that are killed while they load an adapter: real processes, `kill -9`, every token."""

import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from protocol.adapters import read_adapter
from protocol.lifecycle import Role
from protocol.process.failpoints import LOG_FILE, VARIABLE, arm
from scripts.testing import Engine, EngineFactory, eventually
from tests.system.models.lora_streams import TARGETS, demo_model, greedy, have
from tests.system.null_adapters import write_null_adapter
from tests.system.null_load import Stream
from tests.worker.adapters.peft_adapters import write_adapter
from worker_proc.null.model import next_token_id
from worker_proc.startup.start import NULL_EOS_TOKEN_ID, NULL_VOCAB_SIZE

NUM_TOKENS = 400
_FEW_LEFT = 100
"""Tokens that may be on their way to a stream when the worker is killed."""
LONG_MS = 60_000
"""Of a load in which its worker is killed."""
MAX_DEATHS = 4
"""Workers that may be killed in a row in loads of one adapter, as docs/lora.md states."""


def expected(prompt: list[int], path: Path | None) -> list[int]:
    """Return the output of the null model for a prompt, with an adapter or without."""
    adapter_id = 0 if path is None else read_adapter("", str(path))[0].adapter_id
    ids = list(prompt)
    for _ in range(NUM_TOKENS):
        ids.append(next_token_id(ids, NULL_VOCAB_SIZE, [NULL_EOS_TOKEN_ID], adapter_id=adapter_id))
    return ids[len(prompt) :]


class Streams:
    """Two streams for each of some adapters, and two without one.

    Those of an adapter begin after those of the adapter before it, so workers load it later.
    """

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
            eventually(partial(self._have_begun, name), f"the streams of {name} have begun")

    def _have_begun(self, name: str) -> bool:
        """Whether each has a token, or an error."""
        return all(stream.token_ids or not stream.is_open for stream in self.of[name])

    def check(self, *names: str) -> None:
        """Wait for the ends; each token has come once, and is the right one."""
        for name in names:
            for stream in self.of[name]:
                stream.join()
                assert stream.error is None
                assert stream.token_ids == self._expected[stream]
                assert stream.finish_reason == "length"


def kill_in_loads(
    engine: Engine, failpoints: Path, num_loads: int, *, core_too_at: int | None = None
) -> None:
    """Kill a worker in a step, and as many of its successors in the first load that each begins.

    `core_too_at`: the core is killed with the worker in the load of this number, from 0.
    """
    log = failpoints / LOG_FILE
    num_before = len(log.read_text().splitlines()) if log.exists() else 0
    pid = engine.pid(Role.WORKER)

    def find_next(number: int) -> int | None:
        lines = log.read_text().splitlines() if log.exists() else []
        return int(lines[number].split()[2]) if len(lines) > number else None

    for number in range(num_loads):
        arm(failpoints, "worker.load_adapter", f"delay:{LONG_MS}@1")
        os.kill(pid, signal.SIGKILL)
        pid = eventually(partial(find_next, num_before + number), "a worker loads an adapter")
        if number == core_too_at:
            os.kill(engine.pid(Role.CORE), signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    scratch = tmp_path_factory.mktemp("adapters")
    return [
        write_null_adapter(scratch / "first", 1000),
        write_null_adapter(scratch / "second", 2000),
    ]


@pytest.fixture(scope="module")
def failpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of failpoints of all engines."""
    return tmp_path_factory.mktemp("failpoints")


@pytest.fixture(scope="module")
def engine(paths: list[Path], failpoints: Path) -> Iterator[Engine]:
    with EngineFactory() as start:
        start.environ[VARIABLE] = str(failpoints)
        engine = start(
            *("--enable-lora", "--enable-admin-routes", "--null-step-ms", "3", "--max-loras", "2"),
            *("--lora-modules", *(f"{path.name}={path}" for path in paths)),
        )
        engine.ready()
        yield engine


def test_requests_survive_workers_that_are_killed_while_they_load(
    engine: Engine, paths: list[Path], failpoints: Path
) -> None:
    """One fewer than would refuse the adapter."""
    streams = Streams(engine, paths)
    kill_in_loads(engine, failpoints, MAX_DEATHS - 1)
    streams.check("null", "first", "second")


def test_an_adapter_in_whose_loads_all_workers_are_killed_is_refused_until_it_is_loaded_again(
    engine: Engine, paths: list[Path], failpoints: Path
) -> None:
    """Its requests get one error, and others go on.

    A death counts also if the core dies with its worker, and the core's successor refuses what it
    has refused.
    """
    streams = Streams(engine, paths)
    # On a busy machine one may have ended before.
    unfinished = [s for s in streams.of["first"] if len(s.token_ids) < NUM_TOKENS - _FEW_LEFT]
    assert unfinished
    kill_in_loads(engine, failpoints, MAX_DEATHS, core_too_at=1)
    reason = "adapter 'first': workers died when they loaded it"
    for stream in unfinished:
        assert reason in (stream.join().error or "")
    streams.check("null", "second")
    engine.kill(Role.CORE)
    for stream in Streams(engine, [paths[0]]).of["first"]:
        assert reason in (stream.join().error or "")
    body = {"lora_name": "first", "lora_path": str(paths[0]), "load_inplace": True}
    answer = httpx.post(f"{engine.url()}/v1/load_lora_adapter", json=body, timeout=60.0)
    assert answer.status_code == 200, answer.text
    Streams(engine, paths).check("null", "first", "second")


@pytest.mark.slow
def test_texts_of_a_model_are_exact_though_workers_are_killed_while_they_load(
    start_engine: EngineFactory, failpoints: Path, tmp_path: Path
) -> None:
    """The standby and the zygote replace a worker within a fraction of a second."""
    model = demo_model()
    large = write_adapter(tmp_path / "large", model, TARGETS, rank=512, seed=1, strength=0.5)
    small = write_adapter(tmp_path / "small", model, TARGETS, rank=4, seed=2, strength=0.5)
    start_engine.environ[VARIABLE] = str(failpoints)
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
    kill_in_loads(engine, failpoints, MAX_DEATHS - 1, core_too_at=1)
    assert {name: stream.join().token_ids for name, stream in streams.items()} == undisturbed
    assert not any(stream.error for stream in streams.values())
