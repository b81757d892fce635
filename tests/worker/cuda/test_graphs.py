"""Which sizes decode steps are filled up to, and when they are captured."""

import logging
from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from protocol.sampling import SamplingParams
from tests.worker.cuda.interpreter import prepare_triton
from worker_proc.inputs import StepInputs, pack_step
from worker_proc.request import MirroredRequest, ScheduledRequest

prepare_triton()
from worker_proc.cuda import graphs  # noqa: E402
from worker_proc.cuda.block_tables import BlockTables  # noqa: E402
from worker_proc.cuda.device_sampler import DeviceSampler  # noqa: E402
from worker_proc.cuda.graphs import MAX_SIZE, DecodeGraphs, padded_sizes  # noqa: E402

CPU = torch.device("cpu")


@pytest.mark.parametrize("max_num_seqs", [1, 3, 8, 64, 65, 256, 500, 512, 4096])
def test_sizes_cover_every_step_up_to_the_largest(max_num_seqs: int) -> None:
    sizes = padded_sizes(max_num_seqs)
    assert sizes == sorted(set(sizes))
    assert min(max_num_seqs, MAX_SIZE) <= sizes[-1] <= MAX_SIZE
    assert len(sizes) < 30
    for size in range(1, sizes[-1] + 1):
        padded = next(s for s in sizes if s >= size)
        assert padded <= max(2 * size - 1, size + 31)


class _Recorder:
    """Takes the place of the static decodes of a device, and records their captures."""

    def __init__(self) -> None:
        self.captured: list[tuple[int, object]] = []
        self.fails = False
        self.problem = "called a synchronizing operation"

    def make(self, model: object, backend: object, sampler: object, size: int, **_: object) -> Any:
        def capture(pool: object, logits: object, max_rows: int) -> str:
            assert max_rows == 8
            if self.fails:
                raise RuntimeError(self.problem)
            self.captured.append((size, logits))
            return "logits"

        return SimpleNamespace(capture=capture, compute=lambda inputs: size)


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> _Recorder:
    recorder = _Recorder()
    monkeypatch.setattr(graphs, "StaticDecode", recorder.make)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    return recorder


def make_graphs() -> DecodeGraphs:
    backend: Any = SimpleNamespace(tables=BlockTables(1, CPU))
    limits = {"max_num_seqs": 8, "max_model_len": 64, "block_size": 4, "vocab_size": 9}
    sampler = DeviceSampler(backend, 9, MAX_SIZE)
    made = DecodeGraphs(torch.nn.Identity(), backend, sampler, **limits)
    made._is_captured = True
    return made


def step_of(num_requests: int, size: int = 1) -> StepInputs:
    params = SamplingParams()
    requests = [
        MirroredRequest(i, [3] * 4, 4, params, [array("i", [1])], 0, 0) for i in range(num_requests)
    ]
    return pack_step([ScheduledRequest(r, 4 - size, size, True) for r in requests], CPU)


def test_the_largest_size_is_captured_first_and_makes_the_buffer(recorder: _Recorder) -> None:
    made = make_graphs()
    made.capture()
    assert recorder.captured == [(8, None), (4, "logits"), (2, "logits"), (1, "logits")]
    assert [made.compute(step_of(n)) for n in (1, 3, 8)] == [1, 4, 8]
    assert made.compute(step_of(9)) is None
    assert made.compute(step_of(3, size=2)) is None


def test_one_token_of_a_prompt_is_not_replayed(recorder: _Recorder) -> None:
    """With prompt logprobs it has a row, which follows the rows to sample."""
    made = make_graphs()
    described = SamplingParams(prompt_logprobs=1)
    prompt = MirroredRequest(0, [3] * 4, 4, described, [array("i", [1])], 0, 0)
    decode = MirroredRequest(1, [3] * 4, 4, SamplingParams(), [array("i", [1])], 0, 0)
    parts = [ScheduledRequest(prompt, 1, 1, False), ScheduledRequest(decode, 3, 1, True)]
    inputs = pack_step(parts, CPU)
    assert inputs.logits_indices.tolist() == [1, 0]
    assert made.compute(inputs) is None


def test_after_a_sleep_sizes_are_captured_when_they_are_needed(recorder: _Recorder) -> None:
    made = make_graphs()
    made.capture()
    made.forget()
    recorder.captured.clear()
    for _ in range(2):
        assert made.compute(step_of(3)) == 4
    assert recorder.captured == [(4, None)], "the logits of a pool that slept are gone"


def test_a_rank_that_alone_cannot_capture_ends(recorder: _Recorder) -> None:
    """The others replay, and their sums would be paired with those of another layer."""
    recorder.fails = True
    made = make_graphs()
    made._is_divided = True
    assert made.compute(step_of(3)) is None
    recorder.problem = "CUDA out of memory"
    made = make_graphs()
    made._is_divided = True
    with pytest.raises(RuntimeError, match="out of memory"):
        made.compute(step_of(3))


def test_a_forward_that_waits_for_the_device_is_not_captured(
    recorder: _Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    recorder.fails = True
    made = make_graphs()
    with caplog.at_level(logging.WARNING):
        made.capture()
        assert made.compute(step_of(3)) is None
    assert [record.message for record in caplog.records] == [
        "decode steps run without CUDA graphs: called a synchronizing operation"
    ]
