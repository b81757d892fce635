"""Models with recurrent layers in real processes: kill -9 of worker and core changes no token."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from scripts.testing import EngineFactory
from tests.chaos.__main__ import main
from tests.chaos.faults import PARTS
from tests.system.kills import build_model, check_tokens_after_kills
from tests.worker.checkpoints import Architecture
from tests.worker.recurrent_models import KEY_DECAYS, KINDS, build_with_tokenizer
from worker_proc.native.build import build, compiler

SLOW = pytest.mark.slow
BY_DEFAULT = next(kind for kind in KEY_DECAYS if kind.name == "kimi_linear")
"""It has multi-head latent attention, mixtures of experts, short convolutions and a delta rule."""
OTHERS = [kind for kind in (*KINDS, *KEY_DECAYS) if kind is not BY_DEFAULT]
DRAFTS = ("--num-speculative-tokens", "3", "--no-adaptive-speculation")


@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        (BY_DEFAULT, ()),
        *(pytest.param(kind, (), marks=SLOW) for kind in OTHERS),
        *(pytest.param(kind, DRAFTS, marks=SLOW) for kind in (*KINDS, *KEY_DECAYS)),
    ],
    ids=lambda value: getattr(value, "name", None) or "drafts" * bool(value) or "plain",
)
def test_streams_continue_after_kill_9(
    architecture: Architecture, more: Sequence[str], tmp_path: Path, start_engine: EngineFactory
) -> None:
    """States are computed again from the beginning, or from a snapshot."""
    settings = ("--no-api", "--num-threads", "1", "--dtype", "bfloat16", "--mamba-block-size", "64")
    engine = start_engine(*settings, *more, model=build_model(tmp_path, architecture))
    facts = check_tokens_after_kills(engine, num_prompts=2, max_tokens=200)
    # Forks, of which several have run, do not log what was chosen before.
    assert engine.log.count(" INFO recurrent states: ") == 1
    assert facts.kv_groups[-1].is_state
    assert bool(facts.speculation) == bool(more)


@pytest.mark.slow
@pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("architecture", KINDS, ids=lambda kind: kind.name)
def test_kills_in_every_phase_change_no_stream(
    architecture: Architecture, part: str, tmp_path: Path
) -> None:
    """Worker, core or both die: streams of every kind are computed again from their states."""
    build()
    build_with_tokenizer(tmp_path / "model", architecture)
    cells = ("--matrix", "--faults", "worker,core,both", "--phases", ",".join(PARTS[part]))
    settings = ("--num-threads", "1", "--mamba-block-size", "64")
    assert main(["--model", str(tmp_path / "model"), *cells, "--", *settings]) == 0
