"""With --batch-invariant a row on a GPU has the same bits, and tokens, in every batch."""

from pathlib import Path

import pytest
import torch

from protocol.sampling import SamplingParams
from tests.gpu.runners import make_runner
from tests.worker.checkpoints import ARCHITECTURES, build_checkpoint
from tests.worker.driving import drive
from tests.worker.parity import make_prompts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SCHEDULES: tuple[dict[str, object], ...] = (
    {"enable_prefix_caching": False},
    {"max_num_batched_tokens": 16},
    {"max_num_seqs": 4, "max_steps_in_flight": 2},
    {"max_num_seqs": 1},
)
LLAMA = next(architecture for architecture in ARCHITECTURES if architecture.name == "llama")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_product_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    from worker_proc.cuda.products import multiply

    rows = torch.randn(600, 1024, device="cuda", dtype=dtype)
    weight = torch.randn(3000, 1024, device="cuda", dtype=dtype)
    whole = multiply(rows, weight, None)
    expected = torch.nn.functional.linear(rows.double(), weight.double())
    assert (whole.double() - expected).norm() < 0.01 * expected.norm()
    for first, end in ((0, 1), (77, 78), (64, 128), (9, 300), (599, 600)):
        assert torch.equal(multiply(rows[first:end], weight, None), whole[first:end])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sampled_tokens_do_not_depend_on_the_schedule(dtype: str, tmp_path: Path) -> None:
    """They depend neither on chunks nor on batches, over graphs and by single launches."""
    build_checkpoint(tmp_path, LLAMA.config())
    prompts = make_prompts()
    params = [
        SamplingParams(max_tokens=12, temperature=1.5, seed=seed) for seed in range(len(prompts))
    ]
    found = []
    for is_eager in (False, True):
        runner = make_runner(tmp_path, dtype, batch_invariant=True, enforce_eager=is_eager)
        assert runner.facts.exact_resume
        for options in SCHEDULES:
            found.append(drive(runner, prompts, params, **options).output_token_ids)
            runner.reset()
    assert all(tokens == found[0] for tokens in found)
