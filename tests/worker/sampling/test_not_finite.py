"""Logits that are not finite: the request fails by name, and its neighbours do not notice."""

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from protocol.config import SchedulerConfig
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import ARCHITECTURES, build_checkpoint
from tests.worker.driving import drive_with_errors
from tests.worker.loading.test_loader import config_of
from worker_proc.calibration.self_check import check_texts
from worker_proc.sampling.step_sampler import NOT_FINITE
from worker_proc.startup.load_runner import load_model_runner

BAD_TOKEN = 200
PROMPTS = [[3, 4, 5, 6, 7], [8, BAD_TOKEN, 9, 10, 11, 12], [13, 14, 15]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in which one token's embedding is NaN."""
    path = tmp_path_factory.mktemp("llama")
    build_checkpoint(path, ARCHITECTURES[0].config())
    weights = path / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.embed_tokens.weight"][BAD_TOKEN] = torch.nan
    save_file(tensors, weights, {"format": "pt"})
    assert all(BAD_TOKEN not in text for text in check_texts(512))
    return path


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_the_request_itself_fails(
    directory: Path, temperature: float, num_drafts: int
) -> None:
    config = config_of(directory, 100, num_gpu_blocks_override=90)
    scheduler_config = SchedulerConfig(num_speculative_tokens=num_drafts)
    config = msgspec.structs.replace(config, scheduler=scheduler_config)
    runner = load_model_runner(config, lambda *_: None)
    params = SamplingParams(temperature=temperature, seed=4, max_tokens=9, logprobs=1)
    outputs, errors = drive_with_errors(runner, PROMPTS, params, num_drafts)
    assert errors == {1: NOT_FINITE}
    assert outputs[1] == []
    alone, none = drive_with_errors(runner, [PROMPTS[0], PROMPTS[2]], params, num_drafts)
    assert none == {}
    assert [outputs[0], outputs[2]] == alone
    assert all(alone)
