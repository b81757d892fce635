"""Sampling on a GPU: the tokens of the host's sampler, and of steps that wait for each other."""

import random
from pathlib import Path

import pytest
import torch

from protocol.sampling import SamplingParams
from tests.gpu.runners import make_eager_runner, make_plain_runner, make_whole_runner
from tests.worker.checkpoints import ARCHITECTURES, VOCAB_SIZE, build_checkpoint
from tests.worker.driving import drive
from tests.worker.sampling.rows import EOS, make_row, random_logits, random_params, random_rows
from worker_proc.sampling.sampler import Sampler

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda")
LARGE_VOCAB = 151_936
NUM_REQUESTS, PROMPT_LEN, MAX_TOKENS = 32, 40, 24
LLAMA = next(architecture for architecture in ARCHITECTURES if architecture.name == "llama")


def both_ways(logits: torch.Tensor, rows: list) -> tuple[list[int], list[int]]:  # type: ignore[type-arg]
    from worker_proc.cuda.choice import TritonChoice

    on_device = Sampler(logits.shape[1], EOS, DEVICE, make_choice=TritonChoice)
    on_host = Sampler(logits.shape[1], EOS, torch.device("cpu"))
    return (
        on_device.sample(logits.to(DEVICE), rows).token_ids,
        on_host.sample(logits, rows).token_ids,
    )


@pytest.mark.parametrize("seed", range(4))
def test_the_device_chooses_the_tokens_of_the_host(seed: int) -> None:
    logits = random_logits(200, seed, spread=(0.02, 1.0, 3.0, 12.0)[seed])
    found, expected = both_ways(logits, random_rows(200, seed))
    assert found == expected


def test_a_large_vocabulary_is_searched_exactly() -> None:
    logits = random_logits(32, 3, spread=3.0, vocab_size=LARGE_VOCAB).float()
    shapes = [{}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 2000, "top_p": 0.99}, {"min_p": 0.02}]
    shapes += [{"temperature": 4.0, "top_p": 0.95}, {"temperature": 0.2}, {"top_p": 1 - 1e-9}]
    rows = [make_row(SamplingParams(seed=i, **shapes[i % len(shapes)])) for i in range(32)]
    found, expected = both_ways(logits, rows)
    assert found == expected


def prompts_and_params() -> tuple[list[list[int]], list[SamplingParams]]:
    """Return requests as in a benchmark, greedy and sampled, none of which needs the host."""
    generator = torch.Generator().manual_seed(0)
    size = (NUM_REQUESTS, PROMPT_LEN)
    prompts: list[list[int]] = torch.randint(VOCAB_SIZE, size, generator=generator).tolist()
    shapes = [{"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 20}, {"temperature": 1.5}]
    params = [
        SamplingParams(max_tokens=MAX_TOKENS, seed=i, ignore_eos=True, **shapes[i % 4])  # type: ignore[arg-type]
        for i in range(NUM_REQUESTS)
    ]
    return prompts, params


def test_steps_that_run_ahead_give_the_tokens_of_steps_that_wait(tmp_path: Path) -> None:
    """In fp32, graphs and single launches give those of torch's kernels, a step at a time."""
    torch.backends.cuda.matmul.allow_tf32 = False
    build_checkpoint(tmp_path, LLAMA.config())
    prompts, params = prompts_and_params()
    expected = drive(make_plain_runner(tmp_path), prompts, params, max_num_seqs=16)
    for make in (make_whole_runner, make_eager_runner):
        for in_flight in (1, 2):
            options = {"max_num_seqs": 16, "max_steps_in_flight": in_flight}
            run = drive(make(tmp_path), prompts, params, **options)
            assert run.output_token_ids == expected.output_token_ids
            assert (run.num_ahead >= MAX_TOKENS // 2) == (in_flight == 2)


def test_the_first_decode_after_a_sleep_keeps_the_tokens_of_the_step_before(
    tmp_path: Path,
) -> None:
    """Its graph is captured while these are on the device alone."""
    build_checkpoint(tmp_path, LLAMA.config())
    prompts, params = prompts_and_params()
    runner = make_whole_runner(tmp_path)
    options = {"max_num_seqs": 16, "max_steps_in_flight": 2}
    expected = drive(runner, prompts, params, **options).output_token_ids
    runner.reset()
    before = torch.cuda.memory_allocated()
    runner.sleep()
    assert runner._graphs is not None
    assert runner._graphs._logits is None
    assert torch.cuda.memory_allocated() < before
    assert drive(runner, prompts, params, **options).output_token_ids == expected


def test_requests_that_are_preempted_continue_exactly(tmp_path: Path) -> None:
    """All parameters occur, so that some steps run ahead and others wait."""
    build_checkpoint(tmp_path, LLAMA.config())
    prompts, _ = prompts_and_params()
    rng = random.Random(0)
    params = [random_params(rng) for _ in prompts]
    runner = make_whole_runner(tmp_path)
    expected = drive(runner, prompts, params, max_num_seqs=4).output_token_ids
    options = {"max_num_seqs": 16, "max_steps_in_flight": 2, "num_blocks": 60}
    run = drive(runner, prompts, params, **options, scheduler_reserve_full_isl=False)
    assert run.num_preemptions
    assert run.output_token_ids == expected
