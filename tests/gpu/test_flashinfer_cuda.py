"""FlashInfer itself attends as the engine's kernels do: single steps, and a model with graphs."""

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from transformers import Gemma2Config

from protocol.config import AttentionName
from tests.gpu.runners import MIN_EQUAL_OUTPUTS, make_runner
from tests.worker.checkpoints import build_checkpoint
from tests.worker.driving import drive
from tests.worker.parity import GREEDY, make_prompts
from worker_proc.attention.interface import Scoring
from worker_proc.kv.kv_groups import LayerSpec

HAS_FLASHINFER = importlib.util.find_spec("flashinfer") is not None
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not HAS_FLASHINFER, reason="FlashInfer is not installed"),
    pytest.mark.timeout(1800),  # it compiles kernels at their first use
]


@pytest.mark.parametrize("is_decode", [True, False])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 2.0)])
def test_a_step_equals_that_of_the_engines_kernels(
    window: int | None, softcap: float | None, is_decode: bool
) -> None:
    from tests.worker.cuda.test_flashinfer_attention import MAX_ERROR, compute, flashinfer, part_of
    from worker_proc.cuda.attention import TritonAttention

    device = torch.device("cuda")
    spec, scoring = LayerSpec(4, 2, 64, 64, window), Scoring(0.1, softcap)
    parts = [part_of(17, 1, [3, 7, 8, 9, 2]), part_of(0, 1, [5])]
    if not is_decode:
        parts.insert(1, part_of(6, 5, [11, 12, 13]))
    expected = compute(TritonAttention([spec], device), spec, scoring, parts, math.nan)
    found = compute(flashinfer(), spec, scoring, parts, math.nan)
    torch.testing.assert_close(found, expected, atol=MAX_ERROR, rtol=0.02)


def test_tokens_are_those_of_the_engines_kernels_up_to_ties(tmp_path: Path) -> None:
    """Graphs are used, and captured again after a sleep."""
    from tests.worker.cuda.test_flashinfer_attention import SMALL

    build_checkpoint(tmp_path, Gemma2Config(**SMALL))
    prompts = make_prompts()
    expected = drive(make_runner(tmp_path, "float16"), prompts, GREEDY).output_token_ids
    runner = make_runner(tmp_path, "float16", attention_backend=AttentionName.FLASHINFER)
    assert runner.attention == "FlashInfer"
    assert runner._graphs is not None
    assert runner._graphs._decodes
    for _ in range(2):
        found = drive(runner, prompts, GREEDY).output_token_ids
        num_equal = sum(a == b for a, b in zip(found, expected, strict=True))
        assert num_equal >= MIN_EQUAL_OUTPUTS * len(prompts)
        runner.reset()
        runner.sleep()
