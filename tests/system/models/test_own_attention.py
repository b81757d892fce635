"""Models that attend by code of their own, in real processes: kill -9 changes no token."""

from pathlib import Path

import pytest

from scripts.testing import EngineFactory
from tests.system.kills import build_model, check_tokens_after_kills
from tests.worker.checkpoints import Architecture
from tests.worker.own_attention_models import KINDS
from worker_proc.native.build import compiler


@pytest.mark.slow  # tests/worker compares the bits of such models after every restart
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("architecture", KINDS, ids=lambda architecture: architecture.name)
def test_streams_continue_after_kill_9(
    architecture: Architecture, tmp_path: Path, start_engine: EngineFactory
) -> None:
    settings = ("--no-api", "--num-threads", "1", "--dtype", "bfloat16")
    engine = start_engine(*settings, model=build_model(tmp_path, architecture))
    facts = check_tokens_after_kills(engine, num_prompts=2, max_tokens=200)
    assert facts.exact_resume
