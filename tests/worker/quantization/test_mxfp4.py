"""Checkpoints of gpt-oss in MXFP4 are read as the weights that they stand for."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from protocol.sampling import SamplingParams
from tests.worker.checkpoints import SHAPE, WINDOW, build_checkpoint, load_model
from tests.worker.driving import drive
from tests.worker.parity import MAX_TOKENS, generate_all, make_prompts, make_runner
from tests.worker.quantization.quantized_checkpoints import replace_tensor
from worker_proc.errors import CheckpointError

BLOCK = 32
EXPERTS = "model.layers.0.mlp.experts"
CONFIG: dict[str, Any] = {
    **SHAPE,
    **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW},
    "intermediate_size": 96,
}
SETTINGS = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens", "lm_head"],
}


def encode(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return blocks and scales for `[experts, inputs, outputs]`, some of them far off."""
    num_experts, num_inputs, num_outputs = weight.shape
    blocks = weight.transpose(1, 2).reshape(num_experts, num_outputs, num_inputs // BLOCK, BLOCK)
    scales = (blocks.abs().amax(-1) / 4).log2().floor().int()
    exact = (blocks / 2.0 ** scales.unsqueeze(-1)).unsqueeze(-1)
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = (exact.abs() - magnitudes).abs().argmin(-1) + 8 * (exact.squeeze(-1) < 0)
    pairs = codes.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, (scales + 127).to(torch.uint8)


def write_mxfp4(directory: Path) -> Path:
    """Write a checkpoint, and beside it what transformers dequantizes it to, in float32."""
    coded, dense = directory / "coded", directory / "dense"
    build_checkpoint(dense, GptOssConfig(**CONFIG))
    build_checkpoint(coded, GptOssConfig(**CONFIG), torch.bfloat16)
    tensors = load_file(coded / "model.safetensors")
    plain = {name: tensor.float() for name, tensor in tensors.items()}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        blocks, scales = encode(plain[name])
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales).float().contiguous()
        del tensors[name]
    save_file(tensors, coded / "model.safetensors", {"format": "pt"})
    save_file(plain, dense / "model.safetensors", {"format": "pt"})
    config = json.loads((coded / "config.json").read_text())
    (coded / "config.json").write_text(json.dumps(config | {"quantization_config": SETTINGS}))
    return coded


def test_tokens_are_those_of_the_weights_that_transformers_dequantizes(tmp_path: Path) -> None:
    coded = write_mxfp4(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.float32)
    prompts = make_prompts()[:6]
    expected = generate_all(model, prompts, MAX_TOKENS)
    loaded = load_model(coded, "float32")
    for name, parameter in loaded.model.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name
    params = SamplingParams(max_tokens=MAX_TOKENS, temperature=0.0)
    run = drive(make_runner(coded, 200), prompts, params, max_num_seqs=6)
    assert run.output_token_ids == expected
    assert len(set(map(tuple, expected))) == len(prompts)


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("gate_up_proj_scales", None, "misses _scales"),
        (
            "gate_up_proj_scales",
            torch.zeros(4, 192, 3, dtype=torch.uint8),
            r"_scales of shape \[4, 192, 3\] instead of \[4, 192, 2\]",
        ),
        ("down_proj_scales", torch.full((4, 64, 3), 255, dtype=torch.uint8), "not numbers"),
        ("down_proj_blocks", torch.zeros(4, 64, 3, 16), "_blocks stored as F32 instead of U8"),
        (
            "down_proj_blocks",
            torch.zeros(4, 64, 48, dtype=torch.uint8),
            r"_blocks of shape \[4, 64, 48\] instead of",
        ),
        ("down_proj_codes", torch.zeros(3), "down_proj_codes, which gpt_oss does not use"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_do_not_fit_are_named(
    part: str, value: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    coded = write_mxfp4(tmp_path)
    replace_tensor(coded, f"{EXPERTS}.{part}", value)
    with pytest.raises(CheckpointError, match=reason) as caught:
        make_runner(coded, 200)
    assert EXPERTS in str(caught.value)
