"""Single layers as auto-round's own classes pack them, where the library is installed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from worker_proc.quantization.auto_round import read_auto_round
from worker_proc.quantization.headers import read_headers
from worker_proc.quantization.scheme import Settings

pytestmark = pytest.mark.slow
LAYER = "model.layers.0.mlp.up_proj"
SHAPE = 64, 128
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The magnitudes of numbers of 4 bits."""


def make_linear() -> torch.nn.Linear:
    linear = torch.nn.Linear(SHAPE[1], SHAPE[0], bias=False)
    weight = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)) * 0.05
    linear.weight.data = weight
    return linear


def read(directory: Path, settings: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Any:
    """Return the weight of a layer in float32, from a file with its tensors."""
    named = {f"{LAYER}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, directory / "model.safetensors", {"format": "pt"})
    format = read_auto_round(Settings(directory / "config.json", "quantization_config", settings))
    headers = {
        name.rpartition(".")[2]: entry for name, entry in read_headers(str(directory)).items()
    }
    scheme = format.scheme_of(LAYER)
    assert headers.keys() <= {*format.codes, *format.parts}
    assert scheme.shape(headers, tensors.__getitem__) == SHAPE
    return scheme.read(tensors).dequantize(torch.float32)


def tensors_of(layer: Any) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in layer.state_dict().items() if tensor.numel()}


@pytest.mark.parametrize(
    ("packing", "bits", "is_symmetric"),
    [
        ("auto_round", 4, False),
        ("auto_round", 8, False),
        ("auto_round:gptqmodel", 4, False),
        ("auto_round:auto_gptq", 4, True),
    ],
)
def test_packed_whole_numbers_have_their_zero_points(
    packing: str, bits: int, is_symmetric: bool, tmp_path: Path
) -> None:
    export = pytest.importorskip("auto_round.export.export_to_autoround.export")
    linear, most = make_linear(), 2**bits - 1
    groups = linear.weight.data.unflatten(1, (-1, 32))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / most).half().float()
    zeros = (-low / scales).round().clamp(0, most)
    if is_symmetric:
        scales = (2 * groups.abs().amax(-1) / most).half().float()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    pack = export.dynamic_import_quant_linear_for_packing(packing, bits, 32, is_symmetric, 16)
    layer = pack(bits, 32, SHAPE[1], SHAPE[0], bias=False, weight_dtype=torch.float32)
    layer.device = torch.device("cpu")
    layer.pack(linear, scales, zeros, None, device="cpu")
    settings = {"packing_format": packing, "bits": bits, "group_size": 32, "data_type": "int"}
    scale, zero = (one.repeat_interleave(32, 1) for one in (scales, zeros))
    codes = ((linear.weight.data / scale).round() + zero).clamp(0, most)
    assert torch.equal(read(tmp_path, settings, tensors_of(layer)), (codes - zero) * scale)


@pytest.mark.parametrize(("kind", "bits"), [("mx_fp", 4), ("mx_fp", 8), ("nv_fp", 4)])
def test_packed_floating_point_numbers_have_their_scales(
    kind: str, bits: int, tmp_path: Path
) -> None:
    export = pytest.importorskip("auto_round.export.export_to_autoround.qlinear_fp")
    linear, size = make_linear(), 16 if kind == "nv_fp" else 32
    greatest = linear.weight.data.unflatten(1, (-1, size)).abs().amax(-1)
    options: dict[str, Any] = {"data_type": kind, "act_bits": bits, "act_data_type": kind}
    layer = export.QuantLinear(bits, size, SHAPE[1], SHAPE[0], False, **options)
    if kind == "nv_fp":
        whole = torch.tensor([2.0**11])
        stored = (whole * greatest / 6).to(torch.float8_e4m3fn).float()
        factors, unused = stored / whole, torch.ones(1)
        layer.pack(linear, stored, global_scale=whole, input_global_scale=unused, device="cpu")
    else:
        exponents = (greatest / (6 if bits == 4 else 448)).log2().ceil()
        factors = 2.0**exponents
        layer.pack(linear, exponents, device="cpu")
    scale = factors.repeat_interleave(size, 1)
    ratios = linear.weight.data / scale
    values = ratios.to(torch.float8_e4m3fn).float()
    if bits == 4:
        places = (ratios.abs().unsqueeze(-1) - E2M1).abs().argmin(-1)
        values = E2M1[places] * ratios.sign()
    settings = {"packing_format": "auto_round:llm_compressor", "bits": bits, "group_size": size}
    found = read(tmp_path, settings | options, tensors_of(layer))
    assert torch.equal(found, values * scale)
