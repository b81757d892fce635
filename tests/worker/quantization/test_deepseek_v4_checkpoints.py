"""DeepSeek-V4 as it is published: names, FP8 with exponents as scales, experts in MXFP4."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from protocol.sampling import SamplingParams
from tests.worker.bitwise import NUM_THREADS, compare, engine_config
from tests.worker.checkpoints import change_config
from tests.worker.driving import drive
from tests.worker.parity import generate, make_prompts, make_runner
from tests.worker.quantization.coded_models import open_files
from tests.worker.quantization.deepseek_v4_checkpoints import write_published
from tests.worker.quantization.quantized_checkpoints import replace_tensor
from tests.worker.runners import make_runners
from worker_proc.errors import CheckpointError
from worker_proc.modules.experts.grouped import GroupedExperts
from worker_proc.native.build import compiler
from worker_proc.native.packed_weights import Format

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("two_threads")]
needs_kernels = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
MAX_TOKENS = 40
EXPERT = "layers.1.ffn.experts.2.w2"


@pytest.mark.parametrize("has_fp4", [True, False], ids=["fp4", "fp8"])
@needs_kernels
def test_tokens_are_those_of_the_dequantized_checkpoint(has_fp4: bool, tmp_path: Path) -> None:
    """The codes of experts stay in memory."""
    coded = write_published(tmp_path, has_fp4=has_fp4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    prompts = make_prompts()[:6]
    expected = [generate(model, prompt, MAX_TOKENS) for prompt in prompts]
    runner = make_runner(coded, 200)
    experts = [part for part in runner._model.modules() if isinstance(part, GroupedExperts)]
    formats = {format for e in experts for format in (e.products.up.format, e.products.down.format)}
    assert formats == {Format.GROUPED_TABLE if has_fp4 else Format.GROUPED_E4M3}
    assert runner.facts.quantization == ("fp8 fp4" if has_fp4 else "fp8")
    greedy = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    run = drive(runner, prompts, greedy, max_num_seqs=6)
    assert run.output_token_ids == expected
    assert len(set(map(tuple, expected))) == len(prompts)


def test_weights_of_experts_are_those_that_transformers_makes_of_them(tmp_path: Path) -> None:
    coded = write_published(tmp_path)
    tensors, weights = load_file(coded / "model.safetensors"), open_files(coded).weights
    dequantize = Fp8Dequantize(None)._dequantize_one
    names = [name for name in weights if ".experts." in name]
    assert len(names) == (4 + 1) * 4 * 3
    for name in names:
        pair = tensors[name], tensors[name.replace("weight", "scale")]
        expected = dequantize(*pair, output_dtype=torch.float32)
        assert torch.equal(weights[name].read().dequantize(torch.float32), expected), name


def test_exponents_may_be_stored_as_whole_numbers(tmp_path: Path) -> None:
    coded = write_published(tmp_path)
    path = coded / "model.safetensors"
    expected = {
        name: weight.read().dequantize(torch.float32)
        for name, weight in open_files(coded).weights.items()
    }
    tensors = load_file(path)
    for name in [name for name in tensors if name.endswith(".scale")]:
        tensors[name] = tensors[name].view(torch.uint8)
    save_file(tensors, path, {"format": "pt"})
    for name, weight in open_files(coded).weights.items():
        assert torch.equal(weight.read().dequantize(torch.float32), expected[name]), name


@needs_kernels
def test_logits_are_the_same_bits_in_every_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coded = write_published(tmp_path)
    change_config(coded, max_position_embeddings=512)
    configs = [engine_config(coded, "bfloat16", threads) for threads in NUM_THREADS]
    compare(make_runners(configs), monkeypatch)


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("scale", None, f"{EXPERT} misses scale$"),
        ("scale", torch.ones(160, 2), r"scale of shape \[160, 2\] instead of \[160, 3\]"),
        ("scale", torch.ones(160, 3, dtype=torch.int8), "scale stored as I8 instead of F32"),
        (
            "scale",
            torch.full((160, 3), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu),
            "scales that are not finite",
        ),
        ("weight", torch.zeros(160, 2, 24, dtype=torch.int8), "a weight of 3 dimensions"),
        ("weight", torch.zeros(160, 48, dtype=torch.uint8), "weight stored as U8 instead of F8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_do_not_fit_are_named(
    part: str, value: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    coded = write_published(tmp_path)
    replace_tensor(coded, f"{EXPERT}.{part}", value)
    with pytest.raises(CheckpointError, match=reason) as caught:
        make_runner(coded, 200)
    assert EXPERT in str(caught.value)
