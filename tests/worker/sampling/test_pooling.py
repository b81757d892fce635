"""Vectors of prompts: equal to transformers' hidden states, and the same bits in every schedule."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from protocol.config import CacheConfig, Device, Dtype, EngineConfig, ModelConfig, WorkerConfig
from protocol.core_worker import ModelRunnerOutput, SchedulerOutput
from protocol.message import unpack_floats
from protocol.sampling import Pooling, PoolingType, SamplingParams, pooling_params
from tests.worker.checkpoints import ARCHITECTURES, build_checkpoint
from tests.worker.driving import drive
from worker_proc.loading.text_model import auto_class
from worker_proc.model_runner import ModelRunner
from worker_proc.runner import ComputedStep, LaunchedStep
from worker_proc.sampling.pooling import _add
from worker_proc.startup.load_runner import load_model_runner

DEFAULT = ("llama_tied", "opt")
"""OPT's forward calls a part of its base model. The other architectures take longer."""
NAMES = [
    a.name if a.name in DEFAULT else pytest.param(a.name, marks=pytest.mark.slow)
    for a in ARCHITECTURES
]
LAST, MEAN = Pooling(), Pooling(PoolingType.MEAN)
POOLINGS = (
    LAST,
    MEAN,
    Pooling(normalize=False),
    Pooling(PoolingType.MEAN, normalize=False),
    Pooling(dimensions=7),
    Pooling(PoolingType.MEAN, dimensions=7),
    *(Pooling(kind) for kind in PoolingType if kind not in (PoolingType.LAST, PoolingType.MEAN)),
)
LENGTHS = (1, 2, 17, 40, 93, 150)


class Recorder:
    """A runner that keeps the vectors of its steps."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.facts = runner.facts
        self.swap_cost_tokens = runner.swap_cost_tokens
        self.vectors: dict[int, bytes] = {}

    def leave(self) -> None:
        pass

    def reset(self, epoch: int = 0) -> None:
        self._runner.reset(epoch)

    def sleep(self) -> None:
        self._runner.sleep()

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        output = self._runner.execute(step)
        self.vectors |= output.pooled
        return output

    def launch(self, step: SchedulerOutput) -> ComputedStep:
        return ComputedStep(self.execute(step))


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, vocab_size, (n,), generator=generator).tolist() for n in LENGTHS]


@pytest.fixture(scope="module", params=NAMES)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelRunner, PreTrainedModel]:
    """A runner, and transformers' model of the same checkpoint."""
    [architecture] = [a for a in ARCHITECTURES if a.name == request.param]
    directory: Path = tmp_path_factory.mktemp(architecture.name)
    own = architecture.config()
    build_checkpoint(directory, own)
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype=Dtype.FLOAT32, device=Device.CPU),
        cache=CacheConfig(block_size=16, num_gpu_blocks_override=200),
        worker=WorkerConfig(num_threads=1),
    )
    runner = load_model_runner(config, lambda phase, done, total: None)
    return runner, auto_class(own).from_pretrained(directory, dtype=torch.float32).eval()


def vectors(
    runner: ModelRunner, texts: list[list[int]], pooling: Pooling, **options: object
) -> list[bytes]:
    recorder = Recorder(runner)
    drive(recorder, texts, pooling_params(pooling), **options)
    return [recorder.vectors[i] for i in range(len(texts))]


@torch.inference_mode()
def expected(model: PreTrainedModel, text: list[int], pooling: Pooling) -> torch.Tensor:
    """Pool transformers' hidden states by hand."""
    base = model.model if model.base_model is model else model.base_model
    hidden = base(input_ids=torch.tensor([text]), use_cache=False)
    vector = pooled(hidden.last_hidden_state[0], pooling.type)[: pooling.dimensions]
    return vector / vector.norm() if pooling.normalize else vector


def pooled(rows: torch.Tensor, kind: PoolingType) -> torch.Tensor:
    """Pool the hidden states of a text as sentence-transformers defines it."""
    weights = torch.arange(1.0, len(rows) + 1)[:, None]
    return {
        PoolingType.LAST: rows[-1],
        PoolingType.CLS: rows[0],
        PoolingType.MEAN: rows.mean(dim=0),
        PoolingType.MAX: rows.max(dim=0).values,
        PoolingType.WEIGHTED_MEAN: (rows * weights).sum(0) / weights.sum(),
        PoolingType.MEAN_SQRT_LEN: rows.sum(0) / len(rows) ** 0.5,
    }[kind]


@pytest.mark.parametrize("pooling", POOLINGS, ids=str)
def test_vectors_are_pooled_hidden_states(
    loaded: tuple[ModelRunner, PreTrainedModel], pooling: Pooling
) -> None:
    runner, model = loaded
    texts = prompts(runner.facts.vocab_size)
    for text, packed in zip(texts, vectors(runner, texts, pooling), strict=True):
        got = torch.tensor(unpack_floats(packed))
        assert len(got) == (pooling.dimensions or runner.facts.embedding_size)
        torch.testing.assert_close(got, expected(model, text, pooling), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("pooling", [Pooling(kind) for kind in PoolingType], ids=list(PoolingType))
def test_vectors_have_the_same_bits_alone_in_a_batch_and_in_chunks(
    loaded: tuple[ModelRunner, PreTrainedModel], pooling: Pooling
) -> None:
    """There are hits in the prefix cache, generations beside them, and preemptions."""
    runner, _ = loaded
    if not runner.facts.exact_resume:
        pytest.skip(runner.facts.exact_resume_reason)
    texts = prompts(runner.facts.vocab_size)
    alone = [vectors(runner, [text], pooling)[0] for text in texts]
    assert vectors(runner, texts, pooling) == alone
    assert vectors(runner, texts, pooling, max_num_batched_tokens=19) == alone
    twice = vectors(runner, texts + texts, pooling, max_num_seqs=1)
    assert twice == alone + alone
    recorder = Recorder(runner)
    generation = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    params = [p for _ in texts for p in (generation, pooling_params(pooling))]
    both = [list(text) for text in texts for _ in range(2)]
    num_blocks = 14 * len(runner.facts.kv_groups)
    run = drive(recorder, both, params, num_blocks=num_blocks, max_num_batched_tokens=23)
    groups = runner.facts.kv_groups
    assert run.num_preemptions > 0 or len(groups) > 1 or groups[0].window is not None
    assert [recorder.vectors[2 * i + 1] for i in range(len(texts))] == alone


def test_the_sum_of_a_mean_has_the_same_bits_for_every_cut() -> None:
    """Another order of the summands would give other bits."""
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(700, 40, generator=generator) * 10.0 ** torch.arange(700)[:, None].remainder(
        9
    )
    whole, weighted = _add(None, rows), _add(None, rows, 1)
    for cut in (1, 7, 255, 256, 257, 699):
        assert torch.equal(_add(_add(None, rows[:cut]), rows[cut:]), whole)
        assert torch.equal(_add(_add(None, rows[:cut], 1), rows[cut:], 1 + cut), weighted)
    assert not torch.equal(rows[:7].double().sum(0) + rows[7:].double().sum(0), whole)


def test_a_vector_that_is_not_finite_fails_its_request_alone(
    loaded: tuple[ModelRunner, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, _ = loaded
    texts = prompts(runner.facts.vocab_size)[:2]
    weight = runner._model.get_input_embeddings().weight  # type: ignore[operator]
    monkeypatch.setattr(weight, "data", weight.data.clone())
    weight.data[texts[1][0]] = float("nan")
    assert texts[1][0] not in texts[0]
    outputs: list[ModelRunnerOutput] = []
    launch = runner.launch

    def keep(step: SchedulerOutput) -> LaunchedStep:
        launched = launch(step)
        outputs.append(launched.finish())
        return launched

    monkeypatch.setattr(runner, "launch", keep)
    drive(runner, texts, pooling_params(LAST))
    assert [set(output.pooled) for output in outputs] == [{0}]
    assert set(outputs[0].request_errors) == {1}
