"""A wheel of all targets serves by the native path where there is no compiler."""

import json
import os
import site
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.lifecycle import Role
from scripts.testing import LOAD_TIMEOUT_S, RunningEngine, eventually
from tests.paths import ROOT
from worker_proc.native.build import TARGETS, best_target, compiler, cpu_description

BUILD_TIMEOUT_S = 2400
PROMPT = {"model": "demo", "prompt": "def ", "max_tokens": 600, "seed": 5, "ignore_eos": True}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * BUILD_TIMEOUT_S),
    pytest.mark.skipif(
        compiler() is None or best_target(cpu_description()) is None,
        reason="no C++ compiler, or no target for this CPU",
    ),
]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel, and with the libraries of this one."""
    base = tmp_path_factory.mktemp("wheel")
    environ = {**os.environ, "PYTHON": sys.executable}
    environ.pop("PYTHONPATH", None)
    command = [ROOT / "scripts/wheel", base]
    built = subprocess.run(
        command, env=environ, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S, check=True
    )
    (wheel,) = base.glob("troika-*-py3-none-linux_x86_64.whl")
    assert built.stdout.split() == [str(wheel)]
    venv.create(base / "venv", with_pip=True)
    python = base / "venv/bin/python"
    subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel],
        env=environ,
        timeout=LOAD_TIMEOUT_S,
        check=True,
    )
    (packages,) = (base / "venv/lib").glob("python*/site-packages")
    # Paths in such a file are searched last, and the files of that kind in them are not read.
    (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return base / "venv"


@pytest.fixture
def engine(installed: Path, tmp_path: Path) -> Iterator[tuple[RunningEngine, str, Path]]:
    """An engine without a compiler and with an empty cache; its socket and its log."""
    environ = {key: value for key, value in os.environ.items() if not key.startswith("TROIKA_")}
    environ.pop("PYTHONPATH", None)
    environ |= {
        "PATH": f"{installed}/bin",
        "CXX": "none",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    run_dir, path, log = str(tmp_path / "run"), str(tmp_path / "socket"), tmp_path / "log"
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [installed / "bin/troika", "serve", "demo", "--uds", path, "--run-dir", run_dir],
            cwd=tmp_path,
            env=environ,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
        )
    running = RunningEngine(run_dir, LOAD_TIMEOUT_S)
    try:
        yield running, path, log
    finally:
        running.close()
        process.kill()
        process.wait()


def text_of(http: httpx.Client, engine: RunningEngine | None = None) -> str:
    """Return a streamed answer; with an engine, its worker dies at the first token."""
    pieces: list[str] = []
    with http.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                answer: dict[str, Any] = json.loads(line.removeprefix("data: "))
                pieces += [choice["text"] for choice in answer["choices"]]
                if engine is not None:
                    engine.kill(Role.WORKER)
                    engine = None
    return "".join(pieces)


def test_it_serves_by_the_native_path_and_continues_after_kill_9(
    installed: Path, engine: tuple[RunningEngine, str, Path], tmp_path: Path
) -> None:
    running, path, log = engine
    (prebuilt,) = installed.glob("lib/python*/site-packages/worker_proc/native/prebuilt")
    assert len(list(prebuilt.glob("*.so"))) == len(TARGETS)
    running.ready()
    line = "layers: native decoder; attention: native kernel, bfloat16 on the CPU"
    eventually(lambda: line in log.read_text(), "the start names the native path")
    transport = httpx.HTTPTransport(uds=path)
    with httpx.Client(
        transport=transport, base_url="http://troika", timeout=LOAD_TIMEOUT_S
    ) as http:
        ready = http.get("/readyz").json()
        assert (ready["decoder"], ready["exact_resume"]) == ("native", True)
        expected = text_of(http)
        assert text_of(http, running) == expected
    target = best_target(cpu_description())
    assert target is not None
    mapped = "".join(
        Path(f"/proc/{row.pid}/maps").read_text()
        for row in running.ready().processes
        if row.role is Role.WORKER
    )
    assert f"{prebuilt}/{target.name}-" in mapped
    assert not list((tmp_path / "cache").rglob("*.so"))
