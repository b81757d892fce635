"""A batch with an engine of its own: deaths of the API and of the run lose and repeat no line."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from protocol.lifecycle import Role
from protocol.sampling import SamplingParams
from scripts.testing import EngineFactory, RunningEngine, eventually
from tests.paths import ROOT
from tests.system.bare_engine import expected_tokens

NUM_LINES = 160
TOKENS = 40
PROMPTS = [[5, 6, n] for n in range(NUM_LINES)]


@pytest.fixture
def factory() -> Iterator[EngineFactory]:
    with EngineFactory() as made:
        yield made


def write_input(path: Path) -> None:
    with path.open("w") as file:
        for n, prompt in enumerate(PROMPTS):
            body = {
                "prompt": prompt,
                "max_tokens": TOKENS,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            request = {"custom_id": f"line-{n}", "method": "POST", "url": "/v1/completions"}
            print(json.dumps(request | {"body": body}), file=file)


def rows(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of an output."""
    whole, _, _ = path.read_text().rpartition("\n") if path.exists() else ("", "", "")
    return [json.loads(row) for row in whole.splitlines()]


def test_kill_9_of_the_api_and_of_the_run_loses_and_repeats_no_line(
    factory: EngineFactory, tmp_path: Path
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_input(source)
    run_dir = f"{factory.base}/batch"
    command = [sys.executable, "-m", "scripts.cli", "run-batch", str(source), str(target)]
    command += ["--model", "null", "--null-step-ms", "2", "--max-num-seqs", "16"]
    command += ["--concurrency", "32", "--log-level", "error"]

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*command, "--run-dir", run_dir],
            cwd=ROOT,
            env=factory.environ,
            stderr=subprocess.PIPE,
            text=True,
        )

    first = start()
    engine = RunningEngine(run_dir)
    try:
        for number, role in ((20, Role.API), (60, Role.WORKER)):
            eventually(lambda at_least=number: len(rows(target)) >= at_least, "lines are answered")
            engine.kill(role)
        assert len(rows(target)) < NUM_LINES
    finally:
        first.send_signal(signal.SIGKILL)
        first.communicate(timeout=20)
        engine.close()
    num_before = len(rows(target))
    assert num_before >= 60
    with target.open("a") as file:
        file.write('{"id":"torn')
    second = start()
    _, errors = second.communicate(timeout=60)
    assert second.returncode == 0, errors
    assert f"{NUM_LINES} lines: {NUM_LINES - num_before} answered, 0 of these with an error, " in (
        errors
    )
    assert not [row["error"] for row in rows(target) if row["error"] is not None]
    found = {row["custom_id"]: row["response"]["body"]["choices"][0] for row in rows(target)}
    assert len(rows(target)) == len(found) == NUM_LINES
    tokens = [found[f"line-{n}"]["token_ids"] for n in range(NUM_LINES)]
    assert tokens == expected_tokens(PROMPTS, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
