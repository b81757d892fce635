"""Steps that are launched before the tokens of the last one are read give the tokens of the CPU."""

from pathlib import Path

import msgspec
import pytest
import torch
from transformers import LlamaConfig

from protocol.config import NativeDecoder
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import build_checkpoint
from tests.worker.cuda.interpreter import DEVICE, prepare_triton
from tests.worker.cuda.small_models import SMALL, make_runner
from tests.worker.cuda.triton_path import set_uses_triton, take_cuda_path
from tests.worker.driving import Run, drive
from tests.worker.parity import make_prompts
from worker_proc.cuda import steps_ahead
from worker_proc.model_runner import ModelRunner
from worker_proc.sampling.step_sampler import NOT_FINITE

prepare_triton()
from tests.worker.cuda.variants import note_variants  # noqa: E402

MAX_TOKENS = 4
PROMPTS = [prompt[:7] for prompt in make_prompts()[:3]]
SAMPLED = [
    SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0),
    SamplingParams(max_tokens=MAX_TOKENS, temperature=1.5, seed=-(2**62)),
    SamplingParams(max_tokens=MAX_TOKENS, temperature=2.0, top_k=20, top_p=0.9, min_p=0.01, seed=4),
]
FOR_THE_HOST = SamplingParams(
    max_tokens=3, temperature=0.8, seed=9, repetition_penalty=1.5, logprobs=1
)
AHEAD = {"max_num_seqs": 4, "max_num_batched_tokens": 12, "max_steps_in_flight": 2}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    build_checkpoint(path, LlamaConfig(**SMALL))
    return path


def make(directory: Path, **options: object) -> ModelRunner:
    with pytest.MonkeyPatch.context() as patch:
        take_cuda_path(patch)
        return make_runner(directory, native_decoder=NativeDecoder.OFF, **options)


@pytest.fixture(scope="module")
def shared_runner(directory: Path) -> ModelRunner:
    return make(directory)


@pytest.fixture
def runner(shared_runner: ModelRunner) -> ModelRunner:
    shared_runner.reset()
    return shared_runner


@pytest.fixture(scope="module")
def expected(directory: Path) -> list[list[int]]:
    """Return what transformers' modules and torch's sampler choose, a step at a time."""
    with pytest.MonkeyPatch.context() as patch:
        set_uses_triton(patch, False)
        plain = make_runner(directory, native_decoder=NativeDecoder.OFF)
    assert plain._steps_ahead is None
    return drive(plain, PROMPTS, SAMPLED, max_num_seqs=1).output_token_ids


@pytest.mark.parametrize("is_eager", [False, True])
def test_tokens_are_those_of_the_host(
    directory: Path, runner: ModelRunner, expected: list[list[int]], is_eager: bool
) -> None:
    """Buffers are static or not, and prompts come in chunks beside decodes."""
    if is_eager:
        runner = make(directory, enforce_eager=True)
    assert (runner._graphs is None) == is_eager
    run = drive(runner, PROMPTS, SAMPLED, **AHEAD)
    assert run.output_token_ids == expected
    assert run.num_ahead >= MAX_TOKENS - 1


def test_a_row_for_the_host_changes_no_other_row(
    runner: ModelRunner, expected: list[list[int]]
) -> None:
    """It joins rows that run ahead, and leaves them again."""
    prompts, params = [PROMPTS[0], *PROMPTS[1:]], [FOR_THE_HOST, *SAMPLED[1:]]
    alone = drive(runner, prompts[:1], params[:1])
    assert alone.num_ahead == 0
    run = drive(runner, prompts[::-1], params[::-1], **AHEAD)
    assert run.output_token_ids[::-1] == [*alone.output_token_ids, *expected[1:]]
    assert 0 < run.num_ahead < run.num_steps - 1


def test_requests_that_are_preempted_continue_exactly(
    runner: ModelRunner, expected: list[list[int]]
) -> None:
    """Some tokens arrive when their request has left the worker's mirror."""
    options = AHEAD | {"num_blocks": 7, "scheduler_reserve_full_isl": False}
    run = drive(runner, PROMPTS, SAMPLED, **options)
    assert run.num_preemptions
    assert run.num_ahead
    assert run.output_token_ids == expected


@pytest.mark.skipif(DEVICE.type == "cuda", reason="notes what is interpreted")
def test_steps_of_other_sizes_need_no_other_kernels(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is compiled while requests wait: variants depend on the model alone."""
    variants = note_variants(monkeypatch)
    params = [FOR_THE_HOST, *SAMPLED[1:]]  # the others run ahead when the first one has ended
    drive(runner, PROMPTS[:2], params[:2], max_num_seqs=1, max_steps_in_flight=2)
    before = set(variants)
    prompts = [prompt[:size] for prompt, size in zip(make_prompts()[:3], (3, 16, 5), strict=True)]
    drive(runner, prompts, params, max_num_seqs=3, max_num_batched_tokens=17)
    assert variants == before


def test_requests_that_end_in_a_step_leave_the_next_one_and_their_blocks(
    runner: ModelRunner, expected: list[list[int]]
) -> None:
    """The end is known when the next step is launched; others then take the blocks."""
    places = range(len(PROMPTS))
    stopping = [
        msgspec.structs.replace(SAMPLED[i], stop_token_ids=[expected[i][1]]) for i in places
    ]
    ends = [tokens[: tokens.index(tokens[1]) + 1] for tokens in expected]
    options = AHEAD | {"max_num_seqs": 2, "num_blocks": 7, "enable_prefix_caching": False}
    run = drive(runner, PROMPTS * 2, [*stopping, *SAMPLED], **options)
    assert run.output_token_ids == [*ends, *expected]
    assert run.num_ahead


def test_requests_of_a_process_that_died_continue_exactly(
    runner: ModelRunner, expected: list[list[int]]
) -> None:
    """Another worker, or this one with another core, knows the tokens that were sent alone."""

    class Killed(Exception):
        pass

    launch, num_steps = runner.launch, iter(range(4))

    def launch_some(step: object) -> object:
        if next(num_steps, None) is None:
            raise Killed
        return launch(step)  # type: ignore[arg-type]

    runner.launch = launch_some  # type: ignore[assignment]
    with pytest.raises(Killed):
        drive(runner, PROMPTS, SAMPLED, **AHEAD)
    unread = runner._launched
    assert unread is not None
    del runner.launch
    known = [tokens[:place] for place, tokens in enumerate(expected)]
    run: Run = drive(runner, PROMPTS, SAMPLED, known, **AHEAD)
    assert run.output_token_ids == expected
    unread.finish()  # what the device still computed reaches no request


def test_logits_that_are_not_finite_fail_their_request_alone(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert runner._steps_ahead is not None
    sampler = runner._steps_ahead.sampler
    choose = sampler.choose

    def spoil(logits: torch.Tensor, *args: torch.Tensor) -> None:
        logits = logits.clone()
        logits[1] = float("nan")
        choose(logits, *args)

    monkeypatch.setattr(sampler, "choose", spoil)
    errors = []
    read = steps_ahead.ModelRunnerOutput

    def record(*args: object, **fields: object) -> object:
        errors.append(fields.get("request_errors"))
        return read(*args, **fields)  # type: ignore[arg-type]

    monkeypatch.setattr(steps_ahead, "ModelRunnerOutput", record)
    drive(runner, PROMPTS[:2], SAMPLED[0], max_num_seqs=2)
    assert {1: NOT_FINITE} in errors
    assert all(set(found or {}) <= {1} for found in errors)
