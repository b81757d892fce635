"""The warm-up of a standby does not change later results."""

import msgspec
import pytest

from protocol.config.settings import configure
from protocol.model_facts import KVGroup
from protocol.sampling import SamplingParams
from tests.worker.driving import drive
from worker_proc.calibration.warm_up import NUM_TEXTS, warm_up
from worker_proc.null.runner import NullRunner
from worker_proc.startup.start import null_facts

PROMPTS = [[5, 6, 7, n] for n in range(8)]


def make(num_blocks: int, num_groups: int = 1, max_model_len: int = 512) -> NullRunner:
    config = configure(
        model="null", num_gpu_blocks_override=num_blocks, max_model_len=max_model_len
    )
    groups = [KVGroup()] * num_groups
    return NullRunner(msgspec.structs.replace(null_facts(config), kv_groups=groups))


@pytest.mark.parametrize("num_groups", [1, 3])
def test_warm_runner_gives_the_same_tokens(num_groups: int) -> None:
    """No state is left from it; the null runner asserts every delta."""
    params = SamplingParams(max_tokens=20)
    expected = drive(make(512, num_groups), PROMPTS, params).output_token_ids
    runner = make(512, num_groups)
    warm_up(runner)
    assert drive(runner, PROMPTS, params).output_token_ids == expected


@pytest.mark.parametrize(("num_blocks", "max_model_len"), [(NUM_TEXTS, 64), (512, 2), (512, 3)])
def test_small_engines_are_left_alone_or_get_short_texts(
    num_blocks: int, max_model_len: int
) -> None:
    runner = make(num_blocks, max_model_len=max_model_len)
    warm_up(runner)
