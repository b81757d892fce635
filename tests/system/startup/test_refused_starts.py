"""A start that is refused: how long a person waits for the reason."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3Config

from scripts.testing import EngineFactory
from tests.paths import DEMO_MODEL
from tests.timing import within
from tests.worker.checkpoints import SHAPE
from tests.worker.hollow_checkpoints import write_hollow

SIZES: dict[str, Any] = {
    **{"hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 20},
    "vocab_size": 4096,
}
"""Of weights of 4 GB, which take seconds to read."""
REFUSED: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (("--enable-lora", "--dtype", "float16"), 2, "--enable-lora needs --dtype float32 or bfloat16"),
    (("--max-model-len", "257"), 1, "max_model_len 257 is greater than the 256 tokens"),
    (("--max-model-len", "250", "--num-gpu-blocks-override", "3"), 1, "max_model_len 250 needs"),
)
"""Flags, and how the command ends: 2 if the flags alone are enough to refuse them."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("flags", "status", "reason"), REFUSED, ids=str)
def test_the_reason_comes_within_three_seconds(
    flags: tuple[str, ...], status: int, reason: str, start_engine: EngineFactory, tmp_path: Path
) -> None:
    """The time runs from the command on, on two free cores; weights alone would take longer."""
    num_bytes = write_hollow(tmp_path / "model", Qwen3Config(**SHAPE | SIZES))
    assert num_bytes > 4_000_000_000
    for file in DEMO_MODEL.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "model")

    def measure() -> dict[str, float]:
        started = time.monotonic()
        engine = start_engine(*flags, "--device", "cpu", model=str(tmp_path / "model"))
        assert engine.process.wait(90) == status
        assert reason in engine.log
        return {"seconds": time.monotonic() - started}

    within(5, measure, seconds=3.0)


@contextmanager
def busy() -> Iterator[None]:
    """Keep as many processors busy as there are."""
    count = len(os.sched_getaffinity(0))
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "orion"}, "model_type is 'orion', for which the installed transformers"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quant_method is 'hqq'; supported"),
    ],
    ids=["type", "format"],
)
def test_what_config_json_excludes_comes_in_time_on_a_busy_machine(
    changes: dict[str, Any], reason: str, start_engine: EngineFactory, tmp_path: Path
) -> None:
    Qwen3Config(**SHAPE).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    def measure() -> dict[str, float]:
        started = time.monotonic()
        engine = start_engine("--no-api", "--device", "cpu", model=str(tmp_path))
        assert engine.process.wait(90) == 1
        assert reason in engine.log
        return {"seconds": time.monotonic() - started}

    with busy():
        within(5, measure, seconds=3.0)
