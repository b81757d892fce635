"""Modules that attend several times in a step have keys and values for each call."""

from pathlib import Path

import msgspec
import pytest

from protocol.config import LoraConfig, ParallelConfig
from tests.families.configs import small_config
from tests.worker.checkpoints import build_checkpoint
from tests.worker.driving import drive
from tests.worker.parity import GREEDY, ROOMY, make_runner, parity_config
from worker_proc.errors import UnsupportedModel
from worker_proc.startup.load_runner import load_model_runner

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("hrm_text")
    build_checkpoint(directory, small_config("hrm_text"))
    return directory


def test_a_step_begins_with_the_first_call_of_each_module(checkpoint: Path) -> None:
    """A forward that failed may have left others."""
    runner = make_runner(checkpoint, ROOMY)
    prompts = [[3, 4, 5, 6], [7, 8]]
    expected = drive(runner, prompts, GREEDY).output_token_ids
    [in_turn, *_] = runner._model.__dict__["layers_in_turn"]
    layers = [in_turn.next() for _ in range(len(in_turn) + 1)]
    assert len({layer.kv.keys.data_ptr() for layer in layers}) == len(in_turn) > 1
    assert drive(runner, prompts, GREEDY).output_token_ids == expected
    assert in_turn.next() is layers[0]


@pytest.mark.parametrize(
    "settings",
    [
        {"parallel": ParallelConfig(tensor_parallel_size=2)},
        {"parallel": ParallelConfig(pipeline_parallel_size=2)},
        {"lora": LoraConfig(enable_lora=True)},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_ranks_stages_and_adapters_are_refused(
    checkpoint: Path, settings: dict[str, object]
) -> None:
    config = msgspec.structs.replace(parity_config(checkpoint, ROOMY), **settings)
    with pytest.raises(UnsupportedModel, match="self_attn attends several times in a step"):
        load_model_runner(config, lambda phase, done, total: None)
