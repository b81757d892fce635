"""Whole engines that fetch their model from a hub: kills, signals, refusals, embedding."""

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api_proc.llm import LLM, SamplingParams
from protocol.config.settings import configure
from protocol.lifecycle import Role
from protocol.process.launch import CLOSE_GRACE_S, EngineProcesses, EngineStartError
from scripts.inprocess import InprocEngine
from scripts.testing import Engine, EngineFactory, eventually, is_alive
from tests.hub import Hub
from tests.paths import DEMO_MODEL, ROOT

NAME = "tiny/demo"
WEIGHTS = "model.safetensors"
CONFIG = "config.json"
HELD_AT = 2**20
REQUEST = {"model": NAME, "prompt": "def add(a, b):", "max_tokens": 24, "temperature": 0}


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub with the demo model."""
    with Hub() as started:
        started.add(NAME, DEMO_MODEL)
        yield started


@pytest.fixture
def long_config(hub: Hub, tmp_path: Path) -> None:
    """The hub holds back the first file: before it is there, nothing is checked or computed."""
    directory = tmp_path / "long"
    shutil.copytree(DEMO_MODEL, directory)
    (directory / CONFIG).write_text((DEMO_MODEL / CONFIG).read_text() + " " * 4 * HELD_AT)
    hub.add(NAME, directory)
    hub.holds[CONFIG] = HELD_AT


def start(factory: EngineFactory, hub: Hub, home: Path) -> Engine:
    """Start an engine, and return it when the hub holds back a file."""
    factory.environ |= hub.environ(home)
    hub.is_holding.clear()
    engine = factory(model=NAME)
    eventually(hub.is_holding.is_set, "a file is on its way", 90)
    return engine


def fetcher(engine: Engine) -> int:
    """Return the pid of the only child, which fetches."""
    pid = engine.process.pid
    [child] = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return child


def num_bytes_here(home: Path) -> int:
    sizes = [0]
    for path in home.rglob("*.incomplete"):
        with contextlib.suppress(FileNotFoundError):  # it has got its final name
            sizes.append(path.stat().st_size)
    return max(sizes)


def begins(hub: Hub, file: str) -> list[int]:
    """Return the offsets from which a file was fetched."""
    return [int((given or "bytes=0-")[6:-1]) for given in hub.fetched(file)]


@pytest.mark.usefixtures("long_config")
def test_an_engine_that_ends_while_it_fetches_leaves_what_has_come_to_the_next_one(
    start_engine: EngineFactory, hub: Hub, tmp_path: Path
) -> None:
    """The supervisor ends by kill -9, and the next one by SIGTERM."""
    home = tmp_path / "home"
    engine = start(start_engine, hub, home)
    child = fetcher(engine)
    eventually(lambda: num_bytes_here(home) >= HELD_AT, "what was sent is on the disk")
    engine.process.kill()
    engine.process.wait(20)
    eventually(lambda: not is_alive(child), "the fetch has ended with its supervisor", 2.0)

    hub.holds[CONFIG] = 2 * HELD_AT
    engine = start(start_engine, hub, home)
    child = fetcher(engine)
    eventually(lambda: num_bytes_here(home) >= 2 * HELD_AT, "the fetch goes on")
    signalled_at = time.monotonic()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.process.wait(20) == 0
    assert time.monotonic() - signalled_at < 2
    assert not is_alive(child)
    assert begins(hub, CONFIG) == [0, HELD_AT]


@pytest.mark.usefixtures("long_config")
def test_an_embedded_engine_that_fetches_closes_at_once(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in hub.environ(tmp_path / "home").items():
        monkeypatch.setenv(name, value)
    engine = EngineProcesses(configure(model=NAME))
    try:
        eventually(hub.is_holding.is_set, "a file is on its way", 90)
        assert engine.is_fetching, "this time does not count as a start"
    finally:
        begun_at = time.monotonic()
        engine.close()
    assert time.monotonic() - begun_at < CLOSE_GRACE_S, "it was not killed"
    with pytest.raises(EngineStartError) as caught:
        EngineProcesses.start(configure(model="tiny/wrong"), timeout_s=60)
    assert str(caught.value).startswith("model tiny/wrong is not a local path, and does not ")


@pytest.mark.timeout(300)
def test_a_cold_cache_a_killed_fetch_killed_processes_and_no_hub(
    start_engine: EngineFactory, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From nothing to the first token; the next start finds the model in the cache alone.

    What it finds there computes the same tokens.
    """
    home = tmp_path / "home"
    hub.holds[WEIGHTS] = HELD_AT
    engine = start(start_engine, hub, home)
    eventually(lambda: num_bytes_here(home) >= HELD_AT, "what was sent is on the disk")
    os.kill(fetcher(engine), signal.SIGKILL)
    hub.released.set()
    engine.ready()
    assert "it is started again" in engine.log
    assert begins(hub, WEIGHTS) == [0, HELD_AT]
    commit = hub.repositories[NAME].branches["main"]
    assert f"{NAME} at {commit[:12]}" in engine.log
    assert "\r" not in engine.log

    num_requests = len(hub.requests)
    [choice] = engine.post("/v1/completions", **REQUEST)["choices"]
    engine.kill(Role.WORKER)
    engine.kill(Role.API)
    engine.readiness()
    assert engine.post("/v1/completions", **REQUEST)["choices"] == [choice]
    engine.close()

    for name, value in hub.environ(home).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(EngineStartError, match="tensor_parallel_size 64 cannot divide the model"):
        LLM(NAME, revision="main", tensor_parallel_size=64)  # which its config.json shows
    [snapshot] = map(str, home.rglob(f"snapshots/{commit}"))
    settings: dict[str, Any] = {"model": snapshot, "num_threads": 1}
    with LLM(engine=InprocEngine(configure(**settings)), **settings) as llm:
        params = SamplingParams(max_tokens=24, temperature=0)
        [output] = llm.generate(str(REQUEST["prompt"]), params, use_tqdm=False)
    assert output.outputs[0].text == choice["text"]
    assert len(hub.requests) == num_requests, "successors and later starts use the snapshot"


def test_a_model_that_cannot_run_is_refused_without_its_weights(
    start_engine: EngineFactory, hub: Hub, tmp_path: Path
) -> None:
    directory = tmp_path / "t5"
    directory.mkdir()
    (directory / CONFIG).write_text('{"model_type": "t5"}')
    for file in ("tokenizer.json", WEIGHTS):
        (directory / file).write_text("{}")
    hub.add("tiny/t5", directory)
    start_engine.environ |= hub.environ(tmp_path / "home")
    engine = start_engine(model="tiny/t5")
    assert engine.process.wait(90) == 1
    assert engine.log.startswith("troika: model tiny/t5 cannot run: ")
    assert engine.log.count("\n") == 1
    assert not hub.fetched(WEIGHTS)


def test_a_wrong_name_is_refused_with_a_directory_that_may_be_meant(
    start_engine: EngineFactory, hub: Hub, tmp_path: Path
) -> None:
    start_engine.environ |= hub.environ(tmp_path / "home")
    engine = start_engine(model="scripts/demo-model")
    assert engine.process.wait(90) == 1
    assert engine.log == (
        f"troika: model scripts/demo-model is not a local path, and does not exist at {hub.url}; "
        f"did you mean {ROOT}/scripts/demo_model?\n"
    )
