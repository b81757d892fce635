"""Invalid values, ids, transitions and outputs are refused by the scheduler."""

import pytest

from core_proc.options import SchedulerOptions
from core_proc.request import TRANSITIONS, Request, RequestStatus
from core_proc.scheduler import Scheduler
from protocol.core_worker import ModelRunnerOutput
from protocol.sampling import SamplingParams


def test_a_taken_id_is_refused() -> None:
    scheduler = Scheduler(SchedulerOptions())
    scheduler.add_request(Request(1, [5], SamplingParams()))
    with pytest.raises(ValueError, match="req_id 1"):
        scheduler.add_request(Request(1, [5], SamplingParams()))


@pytest.mark.parametrize(
    "config",
    [
        {"policy": "lottery"},
        {"num_blocks": 1},
        {"block_size": 0},
        {"max_num_seqs": 0},
        {"max_num_batched_tokens": 0},
        {"max_model_len": 1},
        {"watermark": 1.0},
        {"long_prefill_token_threshold": -1},
        {"max_steps_in_flight": 0},
    ],
)
def test_a_value_out_of_bounds_is_named(config: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=next(iter(config))):
        Scheduler(SchedulerOptions(**config))  # type: ignore[arg-type]


def test_only_listed_transitions_are_possible() -> None:
    for status, allowed in TRANSITIONS.items():
        for target in RequestStatus:
            request = Request(0, [1], SamplingParams())
            request.status = status
            if target in allowed:
                request.become(target)
                continue
            with pytest.raises(AssertionError, match="cannot go"):
                request.become(target)


def test_an_output_of_another_step_is_refused() -> None:
    scheduler = Scheduler(SchedulerOptions())
    scheduler.add_request(Request(0, [1], SamplingParams()))
    scheduler.schedule()
    with pytest.raises(AssertionError, match="step 1, not of 0"):
        scheduler.update_from_output(ModelRunnerOutput(1, [5]))
    with pytest.raises(AssertionError, match="2 tokens, 1 requests sampled"):
        scheduler.update_from_output(ModelRunnerOutput(0, [5, 6]))
    assert len(scheduler.update_from_output(ModelRunnerOutput(0, [5]))) == 1
    with pytest.raises(AssertionError, match="none is in flight"):
        scheduler.update_from_output(ModelRunnerOutput(1, [5]))
