"""The module that embedding services test with: its documented example, and use without pytest."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from protocol.config.settings import configure
from protocol.lifecycle import Role
from protocol.process.launch import EngineProcesses
from scripts import testing
from scripts.testing import EngineFactory, RunningEngine, eventually, is_alive
from tests.paths import ROOT

PAGE = ROOT / "docs" / "embedding.md"


def documented_examples() -> list[str]:
    section = (
        PAGE.read_text()
        .split("## Test your service by killing the engine's processes")[1]
        .split("\n## ")[0]
    )
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


def test_documented_example_passes(tmp_path: Path) -> None:
    conftest, example = documented_examples()
    (tmp_path / "conftest.py").write_text(conftest)
    (tmp_path / "test_example.py").write_text(example)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", tmp_path, tmp_path],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.slow  # test_serves_and_survives_the_death_of_each_process kills in the same way
def test_every_role_is_replaced_and_serves_again() -> None:
    with EngineFactory() as start_engine:
        engine = start_engine()
        for role in (Role.WORKER, Role.CORE, Role.API):
            before = engine.row(role)
            successor = engine.kill(role)
            assert successor.epoch > before.epoch
            assert before.pid is not None
            assert not is_alive(before.pid)
            assert engine.readiness()
            prompt = {"prompt": [5], "max_tokens": 2}
            assert engine.post("/v1/completions", **prompt)["usage"]["completion_tokens"] == 2
        pids = set(engine.all_pids)
        assert len(pids) >= 7
    assert not any(map(is_alive, pids))
    assert not Path(start_engine.base).exists()


def test_an_engine_that_the_program_has_started_is_attached_to() -> None:
    config = configure(model="null", log_level="error")
    with EngineProcesses.start(config, timeout_s=60.0) as processes:
        engine = RunningEngine(processes.run_dir)
        before = engine.pid(Role.WORKER)
        assert engine.kill(Role.WORKER).pid != before
        engine.close()


def test_an_engine_that_ends_is_reported_with_its_log() -> None:
    with (
        EngineFactory() as start_engine,
        pytest.raises(RuntimeError, match=r"the engine has ended:(.|\n)*/nonexistent"),
    ):
        start_engine(model="/nonexistent").ready()


def test_a_wait_that_ends_in_vain_names_its_condition() -> None:
    with pytest.raises(TimeoutError, match=r"not within 0\.02 s: the sky falls"):
        eventually(lambda: None, "the sky falls", 0.02)


def test_an_engine_that_cannot_be_closed_does_not_keep_the_others_alive() -> None:
    start_engine = EngineFactory()
    first, second = start_engine("--no-api"), start_engine("--no-api")
    first.all_pids.add(os.getpid())  # as if a process had survived
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            testing, "eventually", lambda condition, what: eventually(condition, what, 0.1)
        )
        with pytest.raises(TimeoutError, match="all processes are gone"):
            start_engine.close()
    assert second.process.poll() is not None
    assert not Path(start_engine.base).exists()


def test_it_imports_without_pytest() -> None:
    script = """if True:
        import sys
        sys.modules["pytest"] = None
        from scripts import testing
        assert not hasattr(testing, "engine")
        testing.EngineFactory().close()
    """
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


def test_an_engine_ends_with_the_process_that_started_it() -> None:
    script = """if True:
        import time
        from scripts.testing import EngineFactory
        engine = EngineFactory()("--no-api")
        pids = [row.pid for row in engine.ready().processes if row.pid is not None]
        print(*pids, engine.run_dir, flush=True)
        time.sleep(60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        *pids, run_dir = program.stdout.readline().split()
        program.kill()
    eventually(lambda: not any(is_alive(int(pid)) for pid in pids), "all processes are gone")
    shutil.rmtree(Path(run_dir).parent)
