"""Parity on a GPU: fp32 token for token on every path, bf16 up to ties."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from protocol.config import (
    CacheConfig,
    Device,
    EngineConfig,
    ModelConfig,
)
from tests.gpu.runners import (
    MIN_EQUAL_OUTPUTS,
    make_eager_runner,
    make_plain_runner,
    make_runner,
    make_runner_of_modules,
    make_whole_runner,
)
from tests.worker.checkpoints import ARCHITECTURES, Architecture, build_checkpoint
from tests.worker.driving import drive
from tests.worker.parity import GREEDY, MAX_TOKENS, generate, make_prompts
from worker_proc.model_runner import ModelRunner
from worker_proc.startup.load_runner import load_model_runner

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

MODES: tuple[dict[str, object], ...] = (
    {"enable_prefix_caching": False},
    {"max_num_batched_tokens": 16},
    {"max_num_seqs": 4},
)
WITHOUT_GRAPHS = {
    *("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "gpt_oss"),
    *("mixtral", "olmoe", "qwen3_moe"),
}
"""transformers' code for experts waits for the device, so no graphs are captured."""
PORTABLE = {"llama4", "gemma4_shared"}
"""The kernels do not attend within chunks, or for heads of 512 dimensions."""


@pytest.mark.parametrize(
    "make", [make_whole_runner, make_eager_runner, make_runner_of_modules, make_plain_runner]
)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_fp32_outputs_equal_generate(
    architecture: Architecture, make: Callable[[Path], ModelRunner], tmp_path: Path
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = build_checkpoint(tmp_path, architecture.config())
    model.set_attn_implementation("eager")
    prompts = make_prompts()
    expected = [generate(model, prompt, MAX_TOKENS) for prompt in prompts]
    runner = make(tmp_path)
    for options in MODES:
        assert expected == drive(runner, prompts, GREEDY, **options).output_token_ids


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_bf16_outputs_hardly_depend_on_the_cut(architecture: Architecture, tmp_path: Path) -> None:
    build_checkpoint(tmp_path, architecture.config())
    prompts = make_prompts()
    runner = make_runner(tmp_path, "bfloat16")
    first, *others = [drive(runner, prompts, GREEDY, **mode).output_token_ids for mode in MODES]
    for other in others:
        num_equal = sum(a == b for a, b in zip(first, other, strict=True))
        assert num_equal >= MIN_EQUAL_OUTPUTS * len(prompts)


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_decodes_are_captured(architecture: Architecture, tmp_path: Path) -> None:
    """They are captured again after a sleep, when the pool has other addresses."""
    if architecture.name in WITHOUT_GRAPHS:
        pytest.skip("transformers' code for experts")
    build_checkpoint(tmp_path, architecture.config())
    runner = make_runner(tmp_path, "float32")
    graphs = runner._graphs
    if graphs is None:
        assert architecture.name in PORTABLE
        pytest.skip("PyTorch's attention, which makes masks on the host")
    assert set(graphs._decodes) == {1, 2, 4, 8, 16}
    before = drive(runner, make_prompts(), GREEDY).output_token_ids
    runner.reset()
    runner.sleep()
    assert not graphs._decodes
    assert drive(runner, make_prompts(), GREEDY).output_token_ids == before
    assert graphs._decodes


def test_the_pool_is_sized_from_free_memory(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, ARCHITECTURES[0].config())
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path), device=Device.CUDA),
        cache=CacheConfig(gpu_memory_utilization=0.5),
    )
    runner = load_model_runner(config, lambda phase, done, total: None)
    free, total = torch.cuda.mem_get_info()
    assert runner.facts.num_gpu_blocks > 1000
    assert (total - free) / total < 0.55


def test_all_tensors_are_on_the_device_and_cudnn_does_not_attend(tmp_path: Path) -> None:
    build_checkpoint(tmp_path, ARCHITECTURES[0].config())
    runner = make_runner(tmp_path, "bfloat16")
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    tensors = (*runner._model.parameters(), *runner._model.buffers())
    assert {tensor.device.type for tensor in tensors} <= {"cuda", "meta"}
