"""Ranks in processes of their own add up rows by torch.distributed: here over gloo, on the CPU."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, LlamaConfig, PretrainedConfig

from protocol.config import (
    CacheConfig,
    Dtype,
    EngineConfig,
    ModelConfig,
    ParallelConfig,
    RunConfig,
    SchedulerConfig,
    WorkerConfig,
)
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import SHAPE, build_checkpoint
from tests.worker.cuda.interpreter import DEVICE, prepare_triton
from tests.worker.cuda.small_models import prove_briefly
from tests.worker.cuda.triton_path import take_triton_path
from tests.worker.driving import drive
from tests.worker.parity import BLOCK_SIZE, generate, make_prompts
from worker_proc.parallel.device_group import DIFFERS
from worker_proc.parallel.share import Share
from worker_proc.startup import checks
from worker_proc.startup.load_runner import load_model_runner

prepare_triton()
from tests.worker.cuda.rank_processes import in_ranks, rows_of, sum_rows  # noqa: E402
from worker_proc.cuda.rank_group import RankGroup  # noqa: E402

pytestmark = pytest.mark.skipif(DEVICE.type == "cuda", reason="needs a GPU for each rank")

MAX_TOKENS = 4
GREEDY = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.5, seed=3, ignore_eos=True)
SMALL = SHAPE | {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.slow
def test_sums_are_those_of_float32_in_the_order_of_the_ranks(tmp_path: Path) -> None:
    directory = tmp_path / "a run"
    directory.mkdir()
    found = in_ranks(3, sum_rows, directory / "group")
    for index, rows in enumerate(rows_of(3)):
        expected = ((rows[0].float() + rows[1].float()) + rows[2].float()).bfloat16()
        columns = torch.cat(list(rows[:, :, :2]), dim=1)
        for of_rank in found:
            assert torch.equal(of_rank["sums"][index], expected)
            assert torch.equal(of_rank["columns"][index], columns)
    assert all(of_rank["token_ids"] == [7, DIFFERS, 9] for of_rank in found)


@pytest.mark.parametrize("number", [0, 1])
def test_nccl_gets_the_number_of_the_rank_s_gpu(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch refuses a device without a number, and that of a model is "cuda"."""
    asked: list[tuple[str, Any]] = []

    def init_process_group(backend: str, **options: Any) -> None:
        asked.append((backend, options["device_id"]))

    monkeypatch.setattr(torch.distributed, "init_process_group", init_process_group)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: number)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
    group = RankGroup(Share(number, 2), torch.device("cuda"), timeout_s=1.0)
    group.join(tmp_path / "group", [1, 2])
    assert asked == [("nccl", torch.device("cuda", number))]


def compute_tokens(
    rank: int, num_ranks: int, directory: Path, prompts: list[list[int]], dtype: str
) -> dict[str, Any]:
    """Compute prompts in chunks beside decodes, as on a GPU, in one of the ranks."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    patch = pytest.MonkeyPatch()
    take_triton_path(patch)
    patch.setattr(checks, "_setting_with_kernels", lambda *_: None)
    prove_briefly(patch, 1.0)
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype=Dtype(dtype)),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_gpu_blocks_override=200),
        scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks),
        worker=WorkerConfig(num_threads=1),
        run=RunConfig(run_dir=str(directory.with_name("run"))),
    )
    runner = load_model_runner(config, lambda *_: None, rank=rank)
    options = {"max_num_batched_tokens": 12, "max_num_seqs": 4, "max_steps_in_flight": 2}
    run = drive(runner, prompts, [GREEDY, GREEDY, SAMPLED], **options)
    assert runner._graphs is not None
    return {
        "decoder": runner.facts.decoder,
        "attention": runner.attention,
        "token_ids": run.output_token_ids,
        "num_ahead": run.num_ahead,
        "sizes": list(runner._graphs._decodes),
    }


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("config", "decoder"),
    [
        (LlamaConfig(**SMALL), "triton"),
        (GPT2Config(vocab_size=SHAPE["vocab_size"], n_embd=32, n_layer=1, n_head=4), "modules"),
    ],
    ids=["kernels", "modules"],
)
def test_ranks_compute_the_tokens_of_the_whole_model(
    config: PretrainedConfig, decoder: str, tmp_path: Path
) -> None:
    """Steps run ahead, in fp32; a sampled text is the same in all ranks."""
    model = build_checkpoint(tmp_path / "model", config)
    (tmp_path / "run").mkdir(mode=0o700)
    prompts = [prompt[:9] for prompt in make_prompts()[:3]]
    expected = [generate(model, prompt, MAX_TOKENS) for prompt in prompts[:2]]
    found = in_ranks(2, compute_tokens, tmp_path / "model", prompts, "float32")
    for of_rank in found:
        assert of_rank["token_ids"][:2] == expected
        assert (of_rank["decoder"], of_rank["attention"]) == (decoder, "Triton")
        assert of_rank["num_ahead"]
        assert of_rank["sizes"]
    assert found[0]["token_ids"] == found[1]["token_ids"]
    assert not list((tmp_path / "run").glob("*group*"))
