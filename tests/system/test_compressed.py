"""Attention over compressed entries in real processes: kill -9 of worker and core changes no token.

Entries are made of stored rows of several tokens, so that streams are cut within groups.
"""

from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.testing import EngineFactory
from tests.chaos.__main__ import main
from tests.system.kills import build_model, check_tokens_after_kills
from tests.worker.compressed_models import DEEPSEEK_V4
from tests.worker.recurrent_models import build_with_tokenizer
from worker_proc.native.build import build, compiler

DRAFTS = ("--num-speculative-tokens", "3", "--no-adaptive-speculation")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("more", [(), DRAFTS], ids=["plain", "drafts"])
def test_streams_go_on_after_kill_9(
    more: Sequence[str], tmp_path: Path, start_engine: EngineFactory
) -> None:
    settings = ("--no-api", "--num-threads", "1", "--dtype", "bfloat16")
    engine = start_engine(*settings, *more, model=build_model(tmp_path, DEEPSEEK_V4))
    facts = check_tokens_after_kills(engine, num_prompts=2, max_tokens=80)
    assert bool(facts.speculation) == bool(more)


@pytest.mark.timeout(1800)
def test_kills_in_every_phase_change_no_stream(tmp_path: Path) -> None:
    """Of worker, core and both."""
    build()
    build_with_tokenizer(tmp_path / "model", DEEPSEEK_V4)
    faults = ("--matrix", "--faults", "worker,core,both")
    settings = ("--num-threads", "1")
    assert main(["--model", str(tmp_path / "model"), *faults, "--", *settings]) == 0
