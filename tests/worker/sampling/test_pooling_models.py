"""Models without output layer: vectors and scores equal transformers', bit for bit in every batch.

Encoders compute each text in one step; decoders compute chunks and use cached prefixes.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, cast

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForSequenceClassification, MPNetConfig

from protocol.config import CacheConfig, Device, Dtype, EngineConfig, ModelConfig, WorkerConfig
from protocol.config.settings import configure
from protocol.message import unpack_floats
from protocol.sampling import Pooling, PoolingType
from tests.worker.sampling.pooling_checkpoints import (
    ARCHITECTURES,
    DENSE,
    DENSE_SIZE,
    ENCODER,
    PoolingArchitecture,
    build,
    modules_of,
)
from tests.worker.sampling.test_pooling import pooled, vectors
from worker_proc.attention.interface import PagedLayer, Rows, Scoring
from worker_proc.attention.texts import PortableTextBackend, TextBackend
from worker_proc.errors import CheckpointError, UnsupportedModel
from worker_proc.inputs import StepInputs
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.model_runner import ModelRunner
from worker_proc.native.kernels import load_library
from worker_proc.startup.load_runner import load_model_runner

DEFAULT = {"llama_dense", "qwen3_score", "bert_score", "xlm_roberta", "modernbert"}
LENGTHS = (1, 2, 17, 40, 93, 150)


class Loaded(NamedTuple):
    """A runner, and the checkpoint that it has loaded."""

    architecture: PoolingArchitecture
    directory: Path
    runner: ModelRunner


def load(directory: Path) -> ModelRunner:
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype=Dtype.FLOAT32, device=Device.CPU),
        cache=CacheConfig(block_size=16, num_gpu_blocks_override=200),
        worker=WorkerConfig(num_threads=1),
    )
    return load_model_runner(config, lambda phase, done, total: None)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(a, id=a.name, marks=[] if a.name in DEFAULT else pytest.mark.slow)
        for a in ARCHITECTURES
    ],
)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    architecture: PoolingArchitecture = request.param
    directory = tmp_path_factory.mktemp(architecture.name)
    build(directory, architecture)
    return Loaded(architecture, directory, load(directory))


def texts() -> list[list[int]]:
    source = random.Random(5)
    return [[source.randrange(3, 512) for _ in range(n)] for n in LENGTHS]


def pooling_of(loaded: Loaded) -> Pooling:
    return Pooling(loaded.runner.facts.default_pooling, normalize=False)


@torch.inference_mode()
def expected(loaded: Loaded, text: list[int], pooling: Pooling) -> torch.Tensor:
    """Return what transformers computes, and sentence-transformers' layers behind it."""
    directory = loaded.directory
    options = {"input_ids": torch.tensor([text])}
    if pooling.second_text_start:
        types = [int(i >= pooling.second_text_start) for i in range(len(text))]
        options["token_type_ids"] = torch.tensor([types])
    if loaded.architecture.is_classifier:
        model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
        scores: torch.Tensor = model(**options).logits[0]
        return scores
    model = AutoModel.from_pretrained(directory).eval()
    vector = pooled(model(**options).last_hidden_state[0], pooling.type)
    if (dense := directory / "2_Dense" / "model.safetensors").is_file():
        weights = load_file(dense)
        vector = torch.tanh(weights["linear.weight"] @ vector + weights["linear.bias"])
    return vector


def test_vectors_and_scores_are_those_of_transformers(loaded: Loaded) -> None:
    given, pooling = texts(), pooling_of(loaded)
    found = vectors(loaded.runner, given, pooling)
    for text, packed in zip(given, found, strict=True):
        want = expected(loaded, text, pooling)
        got = torch.tensor(unpack_floats(packed))
        torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-4)


def test_the_second_text_of_a_pair_has_tokens_of_another_type(loaded: Loaded) -> None:
    if loaded.architecture.name != "bert_score":
        pytest.skip("the model has one type of tokens")
    text, pooling = texts()[3], pooling_of(loaded)
    pair = Pooling(pooling.type, normalize=False, second_text_start=11)
    [one], [two] = (vectors(loaded.runner, [text], p) for p in (pooling, pair))
    assert one != two
    want = expected(loaded, text, pair)
    torch.testing.assert_close(torch.tensor(unpack_floats(two)), want, rtol=1e-3, atol=2e-4)


def test_bits_do_not_depend_on_the_batch(loaded: Loaded) -> None:
    """Texts are alone, together, in another order, beside equal texts, or after preemptions."""
    runner, given, pooling = loaded.runner, texts(), pooling_of(loaded)
    assert runner.facts.exact_resume, runner.facts.exact_resume_reason
    options = scheduling(loaded)
    alone = [vectors(runner, [text], pooling, **options)[0] for text in given]
    assert vectors(runner, given, pooling, **options) == alone
    assert vectors(runner, given[::-1], pooling, **options) == alone[::-1]
    assert vectors(runner, given + given, pooling, **options | {"max_num_seqs": 3}) == alone + alone
    if not loaded.architecture.is_encoder:
        assert vectors(runner, given, pooling, max_num_batched_tokens=19) == alone


def scheduling(loaded: Loaded) -> dict[str, object]:
    """Return the options with which the core schedules the model."""
    if not loaded.architecture.is_encoder:
        return {}
    whole = {"computes_whole_prompts": True, "enable_prefix_caching": False}
    return {**whole, "max_num_batched_tokens": 160, "enable_chunked_prefill": False}


def test_the_worker_announces_what_the_model_is(loaded: Loaded) -> None:
    architecture, facts = loaded.architecture, loaded.runner.facts
    assert not facts.generates
    assert facts.computes_whole_prompts is architecture.is_encoder
    assert facts.max_model_len == architecture.max_len
    if architecture.is_classifier:
        assert facts.num_labels == facts.embedding_size == architecture.config().num_labels
    else:
        assert facts.num_labels == 0
        assert facts.embedding_size == (
            DENSE_SIZE if "2_Dense/config.json" in architecture.files else 64
        )
    default = {"llama_dense": PoolingType.MEAN, "qwen3_score": PoolingType.LAST}
    default |= {"xlm_roberta": PoolingType.CLS, "bert": PoolingType.CLS}
    assert facts.default_pooling is default.get(architecture.name, facts.default_pooling)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    [architecture] = [one for one in ARCHITECTURES if one.name == "bert_score"]
    build(tmp_path, architecture)
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_speculative_tokens": 3}, "num_speculative_tokens is 3, and .* generates no tokens"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype is int8, and .* has no KV cache"),
        ({"quantization": "w8a16", "dtype": "bfloat16"}, "quantization is w8a16"),
        ({"max_model_len": 257}, "max_model_len 257 is greater than the 256"),
    ],
)
def test_settings_without_effect_are_refused(
    bert: Path, settings: dict[str, object], reason: str
) -> None:
    config = configure(**{"model": str(bert), "dtype": "float32", "num_threads": 1} | settings)
    with pytest.raises((UnsupportedModel, CheckpointError), match=reason):
        load_model_runner(config, lambda phase, done, total: None)


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"1_Pooling/config.json": {}}, "pooling_mode is"),
        ({"modules.json": [{"type": "x.CNN"}]}, 'type is "x.CNN"'),
        (
            modules_of("mean", ("Dense", "2_Dense"))
            | {"2_Dense/config.json": {"in_features": 5, "out_features": 5}},
            "in_features is 5, but its input has 64 numbers",
        ),
        (modules_of("mean", ("Dense", "2_Dense")) | DENSE, "model.safetensors is missing"),
    ],
)
def test_modules_that_cannot_be_computed_are_refused(
    tmp_path: Path, files: dict[str, object], reason: str
) -> None:
    [architecture] = [one for one in ARCHITECTURES if one.name == "bert"]
    build(tmp_path, architecture)
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=reason):
        load(tmp_path)


def test_an_encoder_whose_attention_cannot_be_observed_is_refused(tmp_path: Path) -> None:
    """MPNet adds a bias to its scores, outside of transformers' interface."""
    config = MPNetConfig(**ENCODER | {"pad_token_id": 1})
    AutoModel.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="mpnet"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("per_kv", "window", "softcap"), [(1, None, 0.0), (2, 9, 0.0), (4, 9, 2.0)]
)
def test_the_kernel_attends_as_torch_does(per_kv: int, window: int | None, softcap: float) -> None:
    """Texts of several sections, and of one token; rows of other texts change no bit."""
    library = load_library()
    if library is None:
        pytest.skip("no kernels are compiled")
    torch.manual_seed(3)
    lengths, num_heads, dim = (1100, 1, 40), 4, 24
    total, num_kv_heads = sum(lengths), num_heads // per_kv
    spec = LayerSpec(num_heads, num_kv_heads, dim, dim, window, is_causal=False)
    layer = cast(PagedLayer, SimpleNamespace(spec=spec))
    rows = Rows(
        torch.randn(total, num_heads, dim),
        *(torch.randn(total, num_kv_heads, dim) for _ in range(2)),
    )
    scoring = Scoring(0.3, softcap or None)

    def attend(backend: TextBackend | PortableTextBackend, texts: Sequence[slice]) -> torch.Tensor:
        parts = [SimpleNamespace(num_tokens=text.stop - text.start) for text in texts]
        own = Rows(*(torch.cat([tensor[text] for text in texts]) for tensor in rows))
        firsts = [sum(one.num_tokens for one in parts[:i]) for i in range(len(parts))]
        backend.begin_step(cast(StepInputs, SimpleNamespace(first_rows=firsts, parts=parts)))
        return backend.attend(layer, own, scoring)

    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    texts = [slice(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    native = TextBackend(library, torch.float32)
    found = attend(native, texts)
    torch.testing.assert_close(found, attend(PortableTextBackend(), texts), rtol=1e-4, atol=1e-5)
    for text in texts:
        assert torch.equal(attend(native, [text]), found[text])
