"""The model runner beyond greedy tokens: logprobs, seeds, bookkeeping of the step."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from protocol.core_worker import ModelRunnerOutput, PromptLogprobs
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import ARCHITECTURES, build_checkpoint
from tests.worker.driving import across_the_wire, drive
from tests.worker.parity import make_prompts, make_runner
from tests.worker.steps import new, step
from worker_proc.errors import MirrorError
from worker_proc.model_runner import ModelRunner

PROMPT_LEN = 22


@pytest.fixture(scope="module")
def model_and_runner(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[PreTrainedModel, ModelRunner]:
    directory: Path = tmp_path_factory.mktemp("llama")
    model = build_checkpoint(directory, ARCHITECTURES[0].config())
    return model, make_runner(directory, 400)


def execute_in_chunks(
    runner: ModelRunner, params: SamplingParams, chunk: int
) -> list[ModelRunnerOutput]:
    """Run one prompt of tokens 10, 11, ... and then one decode step."""
    runner.reset()
    request = new(1, PROMPT_LEN + 2)
    text = request.token_ids[: 4 * PROMPT_LEN]
    request = type(request)(*(1, text, PROMPT_LEN, params, request.block_ids, 0, 0))
    outputs, news = [], [request]
    for number, first in enumerate(range(0, PROMPT_LEN, chunk)):
        count = min(chunk, PROMPT_LEN - first)
        outputs.append(runner.execute(step(number, count, news, counts={1: count})))
        news = []
    outputs.append(runner.execute(step(len(outputs), 1)))
    return outputs


@pytest.mark.parametrize("chunk", [1, 5, PROMPT_LEN])
@torch.inference_mode()
def test_logprobs_are_those_of_the_model(
    chunk: int, model_and_runner: tuple[PreTrainedModel, ModelRunner]
) -> None:
    model, runner = model_and_runner
    params = SamplingParams(max_tokens=9, temperature=0.0, logprobs=3, prompt_logprobs=2)
    outputs = execute_in_chunks(runner, params, chunk)
    sampled = [token for output in outputs for token in output.sampled_token_ids]
    assert len(sampled) == 2
    text = [*range(10, 10 + PROMPT_LEN), *sampled]
    expected = torch.log_softmax(model(torch.tensor([text])).logits[0].float(), dim=-1)
    parts: list[PromptLogprobs] = [p for output in outputs for p in output.prompt_logprobs]
    entries = [entry for part in parts for entry in part.entries]
    assert parts[0].first_position == 1
    assert [entry.token_id for entry in entries] == text[1:PROMPT_LEN]
    entries += [entry for output in outputs for entry in output.logprobs.get(1, [])]
    assert [entry.token_id for entry in entries] == text[1:]
    for position, entry in enumerate(entries):
        row = expected[position]
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
        assert entry.top_logprobs[0] == pytest.approx(float(row.max()), abs=1e-3)


def test_first_positions_of_chunks_follow_each_other(
    model_and_runner: tuple[PreTrainedModel, ModelRunner],
) -> None:
    params = SamplingParams(max_tokens=9, temperature=0.0, prompt_logprobs=0)
    outputs = execute_in_chunks(model_and_runner[1], params, 5)
    spans = [
        (part.first_position, len(part.entries)) for out in outputs for part in out.prompt_logprobs
    ]
    assert spans == [(1, 5), (6, 5), (11, 5), (16, 5), (21, 1)]
    assert not any(output.logprobs for output in outputs)


def test_seeded_sampling_is_the_same_however_the_work_is_cut(
    model_and_runner: tuple[PreTrainedModel, ModelRunner],
) -> None:
    prompts = make_prompts()
    params = [
        SamplingParams(max_tokens=10, temperature=0.9, top_p=0.95, seed=i, presence_penalty=0.5)
        for i in range(len(prompts))
    ]
    runner = model_and_runner[1]
    runs = [
        drive(runner, prompts, params, **options).output_token_ids
        for options in (
            {"enable_prefix_caching": False},
            {"max_num_batched_tokens": 16},
            {"max_num_seqs": 3},
        )
    ]
    assert runs[0] == runs[1] == runs[2]
    assert len({tuple(output) for output in runs[0]}) > len(prompts) // 2


def test_a_step_without_tokens_is_answered(
    model_and_runner: tuple[PreTrainedModel, ModelRunner],
) -> None:
    runner = model_and_runner[1]
    runner.reset()
    runner.execute(step(4, 6, [new(1)], counts={1: 6}))
    output = runner.execute(across_the_wire(step(5, 0, finished=[1])))
    assert (output.step_id, output.sampled_token_ids) == (5, [])
    with pytest.raises(MirrorError):
        runner.execute(step(7, 0))
    runner.reset()
    output = runner.execute(step(7, 4, [new(1)], counts={1: 4}))
    assert output.sampled_token_ids == []
    assert output.forward_ns > 0
