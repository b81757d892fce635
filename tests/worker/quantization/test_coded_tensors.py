"""Tensors of quantized checkpoints that do not fit their settings are named."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.parity import make_runner
from tests.worker.quantization.bitsandbytes_layouts import bitsandbytes_int8, bitsandbytes_table
from tests.worker.quantization.coded_models import LAYER, open_files
from tests.worker.quantization.float_layouts import fp8_blocks
from tests.worker.quantization.integer_layouts import awq, gptq, pack_quantized
from tests.worker.quantization.layouts import Layout
from tests.worker.quantization.quantized_checkpoints import write_quantized
from worker_proc.errors import CheckpointError
from worker_proc.quantization.compressed_tensors import IntScheme
from worker_proc.quantization.headers import StoredTensor


@pytest.mark.parametrize(
    ("layout", "part", "value", "reason"),
    [
        (awq(64), "scales", None, f"{LAYER} misses scales"),
        (awq(64), "qzeros", torch.zeros(2, 3, dtype=torch.int32), r"qzeros of shape \[2, 3\] inst"),
        (awq(64), "scales", torch.full((2, 256), torch.inf), "scales that are not finite"),
        (gptq(4, 64, is_symmetric=True), "qweight", torch.zeros(2), "qweight stored as F32"),
        (
            gptq(4, 64, is_symmetric=True),
            "g_idx",
            torch.full((128,), 2, dtype=torch.int32),
            "g_idx outside of its 2 groups",
        ),
        (gptq(4, 64, is_symmetric=True, has_order=True), "g_idx", None, f"{LAYER} misses g_idx"),
        (
            pack_quantized(4, 32, is_symmetric=True),
            "weight_shape",
            torch.tensor([256, 120]),
            r"weight_shape of \[256, 120\] instead of \[256, 128\]",
        ),
        (
            fp8_blocks(),
            "weight",
            torch.tensor(torch.nan).to(torch.float8_e4m3fn).expand(256, 128),
            "codes that are not numbers",
        ),
        (fp8_blocks(), "weight", torch.zeros(256, 64, dtype=torch.float8_e4m3fn), "another shape"),
        (
            fp8_blocks(),
            "weight",
            torch.tensor(0.0).to(torch.float8_e4m3fn).expand(256, 130),
            "weight_scale_inv",
        ),
        (awq(64), "qweight", torch.zeros(128, 16, dtype=torch.int32), "scales of shape"),
        (bitsandbytes_int8(), "SCB", None, f"{LAYER} misses SCB"),
        (
            bitsandbytes_int8(),
            "weight_format",
            torch.tensor(1, dtype=torch.uint8),
            "other than rows",
        ),
        (
            bitsandbytes_table("nf4", is_nested=True),
            "weight.quant_state.bitsandbytes__nf4",
            torch.tensor([1], dtype=torch.uint8),
            "that cannot be read",
        ),
        (
            bitsandbytes_table("nf4", is_nested=True),
            "weight.nested_absmax",
            None,
            f"{LAYER} misses weight.nested_absmax",
        ),
        (
            bitsandbytes_table("fp4", is_nested=False),
            "weight.absmax",
            torch.full((512,), torch.nan),
            "scales that are not finite",
        ),
        (
            bitsandbytes_table("fp4", is_nested=False),
            "weight.quant_map",
            torch.full((16,), torch.nan),
            "a table of values that are not finite",
        ),
        (awq(64), "extra", torch.zeros(3), f"has {LAYER}.extra, which llama does not use"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_tensors_that_do_not_fit_are_named(
    layout: Layout, part: str, value: torch.Tensor | None, reason: str, tmp_path: Path
) -> None:
    write_quantized(tmp_path / "coded", layout)
    path = tmp_path / "coded" / "model.safetensors"
    tensors = load_file(path)
    tensors.pop(f"{LAYER}.{part}", None)
    if value is not None:
        tensors[f"{LAYER}.{part}"] = value.contiguous()
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=reason) as caught:
        make_runner(tmp_path / "coded", 200)  # the values are checked when codes are packed
    assert LAYER in str(caught.value)


STATE = "weight.quant_state.bitsandbytes__nf4"
NESTED = bitsandbytes_table("nf4", is_nested=True)
PLAIN_TABLE = bitsandbytes_table("nf4", is_nested=False)


def state(text: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what replaces the text of a layer."""
    return lambda _: torch.tensor(list(text.encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("layout", "part", "change", "reason"),
    [
        (NESTED, "weight", lambda one: one.to(torch.int8), "weight stored as I8 instead of U8"),
        (NESTED, "weight.absmax", torch.Tensor.float, "absmax stored as F32 instead of U8"),
        (PLAIN_TABLE, "weight.absmax", torch.Tensor.byte, "absmax stored as U8 instead of F32"),
        (PLAIN_TABLE, "weight.quant_map", torch.Tensor.byte, "quant_map stored as U8 instead of"),
        (NESTED, "weight.nested_absmax", torch.Tensor.half, "nested_absmax stored as F16 inste"),
        (NESTED, "weight.nested_quant_map", torch.Tensor.half, "nested_quant_map stored as F16"),
        (bitsandbytes_int8(), "SCB", torch.Tensor.half, "SCB stored as F16 instead of F32"),
        (bitsandbytes_int8(), "weight_format", torch.Tensor.float, "weight_format stored as F32"),
        (NESTED, STATE, torch.Tensor.int, f"{STATE} stored as I32 instead of U8"),
        (NESTED, STATE, lambda one: one.repeat(1000), "of more than 65536 bytes"),
        (NESTED, STATE, state('{"shape": [256, 128], "blocksize": Infinity}'), "cannot be read"),
        (NESTED, STATE, state('{"a": ' + "[" * 60_000), "nested too deeply"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_types_of_tensors_are_checked_by_their_headers(
    layout: Layout,
    part: str,
    change: Callable[[torch.Tensor], torch.Tensor],
    reason: str,
    tmp_path: Path,
) -> None:
    write_quantized(tmp_path / "coded", layout)
    path = tmp_path / "coded" / "model.safetensors"
    tensors = load_file(path)
    tensors[f"{LAYER}.{part}"] = change(tensors[f"{LAYER}.{part}"])
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(CheckpointError, match=reason) as caught:
        open_files(tmp_path / "coded")
    assert LAYER in str(caught.value)


@pytest.mark.parametrize(
    ("zeros", "reason"),
    [
        (torch.full((64, 2), 200, dtype=torch.int32), "has zero points that are not from -128 to"),
        (torch.zeros(64, 2), "has weight_zero_point stored as F32 instead of I8 or I32"),
    ],
)
def test_zero_points_are_whole_numbers_within_the_codes(zeros: torch.Tensor, reason: str) -> None:
    scheme = IntScheme(8, 32, is_packed=False, is_symmetric=False, codes_rows=False)
    tensors = {
        "weight": torch.zeros(64, 64, dtype=torch.int8),
        "weight_scale": torch.ones(64, 2),
        "weight_zero_point": zeros,
    }
    names = {torch.int8: "I8", torch.int32: "I32", torch.float32: "F32"}
    stored = {
        name: StoredTensor("", names[one.dtype], tuple(one.shape)) for name, one in tensors.items()
    }

    def check() -> None:
        scheme.shape(stored, tensors.__getitem__)
        scheme.read(tensors)

    with pytest.raises(ValueError, match=reason):
        check()
