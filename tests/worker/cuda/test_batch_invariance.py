"""With --batch-invariant a row has the same bits alone, in a batch, and in any cut of its text."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, MixtralConfig

from protocol.config import ConfigError
from protocol.config.settings import configure
from protocol.sampling import SamplingParams
from tests.worker.checkpoints import build_checkpoint
from tests.worker.cuda.attention_steps import BLOCK_SIZE, ints
from tests.worker.cuda.interpreter import DEVICE, prepare_triton
from tests.worker.cuda.small_models import SMALL, make_runner, prove_briefly
from tests.worker.cuda.triton_path import take_cuda_path
from tests.worker.driving import drive
from tests.worker.parity import make_prompts
from worker_proc.attention.interface import Scoring
from worker_proc.errors import UnsupportedModel
from worker_proc.kv.kv_groups import LayerSpec
from worker_proc.kv.kv_tensors import KVTensors
from worker_proc.modules.rowwise_linear import is_rowwise

prepare_triton()
from worker_proc.cuda.attention import DeviceStep, PagedStep, attend  # noqa: E402
from worker_proc.cuda.products import TILE_ROWS, multiply  # noqa: E402

MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}
LENGTH = 90
CUTS = (
    [(0, LENGTH)],
    [(0, 33), (33, LENGTH - 33)],
    [(89, 1), (20, 7), (64, 1), (0, 1), (30, 60)],
)
"""Parts of steps over one text: position of the first token, and number of tokens."""


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", MAX_ERROR)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_has_the_same_bits_in_every_batch(dtype: torch.dtype, has_bias: bool) -> None:
    num_rows, num_inputs, num_outputs = TILE_ROWS + 6, 100, 70
    rows = randn(num_rows, num_inputs, dtype=dtype)
    weight = randn(num_outputs, num_inputs, dtype=dtype, seed=1)
    bias = randn(num_outputs, dtype=dtype, seed=2) if has_bias else None
    whole = multiply(rows, weight, bias)
    exact = rows.double() @ weight.double().T + (0.0 if bias is None else bias.double())
    torch.testing.assert_close(whole.double(), exact, atol=1e-4, rtol=MAX_ERROR[dtype])
    for first, end in ((0, 1), (3, 4), (60, 70), (num_rows - 1, num_rows)):
        assert torch.equal(multiply(rows[first:end], weight, bias), whole[first:end])
    assert torch.equal(multiply(rows[None, :5], weight, bias), whole[None, :5])
    transposed = weight.T.contiguous().T
    assert torch.equal(multiply(rows[:5], transposed, bias), whole[:5])


@pytest.mark.parametrize("dtype", MAX_ERROR)
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (13, True)])
def test_attention_has_the_same_bits_in_every_cut(
    dtype: torch.dtype, window: int | None, has_sinks: bool
) -> None:
    """The contexts of decodes may be divided otherwise."""
    spec, scoring = LayerSpec(4, 2, 16, 16, window), Scoring(0.25, None)
    num_blocks = -(-LENGTH // BLOCK_SIZE)
    kv = KVTensors(*(randn(num_blocks, BLOCK_SIZE, 2, 16, dtype=dtype, seed=i) for i in (1, 2)))
    table = torch.arange(num_blocks, dtype=torch.int32, device=DEVICE)[None]
    queries = randn(LENGTH, spec.num_heads, spec.head_dim, dtype=dtype)
    sinks = torch.linspace(-1.0, 1.0, spec.num_heads, device=DEVICE) if has_sinks else None
    seen: torch.Tensor | None = None
    for parts in CUTS:
        sizes = [size for _, size in parts]
        first_rows = [sum(sizes[:index]) for index in range(len(parts) + 1)]
        nothing = ints([0] * len(parts))
        starts = ints([start for start, _ in parts])
        num_decodes = sizes.count(1)
        step = DeviceStep(
            ints(first_rows), starts, nothing, nothing, sum(sizes), num_decodes, num_splits=2
        )
        query = torch.cat([queries[start : start + size] for start, size in parts])
        place = PagedStep(step, table, kv)
        found = attend(place, query, spec, scoring, sinks, is_batch_invariant=True)
        if seen is None:
            seen = found
        for (start, size), rows in zip(parts, found.split(sizes), strict=True):
            assert torch.equal(rows, seen[start : start + size])


def test_a_model_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers are computed by kernels, and its output layer has the same products."""
    take_cuda_path(monkeypatch)
    prove_briefly(monkeypatch, 1.0)
    build_checkpoint(tmp_path, LlamaConfig(**SMALL))
    runner = make_runner(tmp_path, batch_invariant=True)
    assert runner.facts.decoder == "triton"
    assert runner.facts.exact_resume, runner.facts.exact_resume_reason
    linears = [module for module in runner._model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == 8
    assert all(map(is_rowwise, linears))
    prompts = [prompt[:9] for prompt in make_prompts()[:2]]
    params = [SamplingParams(max_tokens=2, temperature=1.5, seed=seed) for seed in range(2)]
    together = drive(runner, prompts, params, max_num_batched_tokens=7)
    alone = drive(runner, prompts, params, max_num_seqs=1)
    assert together.output_token_ids == alone.output_token_ids


def test_a_model_with_other_products_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_cuda_path(monkeypatch)
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
    build_checkpoint(tmp_path, MixtralConfig(**SMALL, **experts))
    reason = r"^batch_invariant: plain matrix products, which depend on the batch, in model\.layers"
    with pytest.raises(UnsupportedModel, match=reason):
        make_runner(tmp_path, batch_invariant=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "cpu"}, "batch_invariant needs device cuda"),
        ({"attention_backend": "flashinfer"}, "batch_invariant needs attention_backend triton"),
        ({"model": "null"}, "batch_invariant needs a model"),
    ],
)
def test_settings_that_exclude_it_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(batch_invariant=True, **settings)
