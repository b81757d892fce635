"""Libraries read the same numbers from the tensors of a checkpoint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.worker.quantization.bitsandbytes_layouts import bitsandbytes_int8, bitsandbytes_table
from tests.worker.quantization.coded_models import LAYER, open_files
from tests.worker.quantization.layouts import Layout
from tests.worker.quantization.quantized_checkpoints import LAYOUTS, write_quantized


@pytest.mark.parametrize(
    "layout",
    [layout for layout in LAYOUTS if "compressed" in layout.description],
    ids=lambda layout: layout.name,
)
def test_the_library_reads_the_same_weights(layout: Layout) -> None:
    library = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    assert library.__version__
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(1))
    parts, values = layout.encode(weight)
    scheme = QuantizationScheme(**layout.settings["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(layout.settings["format"])
    found = compressor.decompress(dict(parts), scheme)["weight"]
    assert torch.equal(found.bfloat16(), values.bfloat16())


@pytest.mark.parametrize("is_nested", [True, False])
@pytest.mark.parametrize("name", ["nf4", "fp4"])
def test_bitsandbytes_reads_the_same_numbers_of_4_bits(
    name: str, is_nested: bool, tmp_path: Path
) -> None:
    """The library writes the tensors, and dequantizes them to float32, as the reader does."""
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(1))
    codes, state = functional.quantize_4bit(
        weight, blocksize=64, quant_type=name, compress_statistics=is_nested
    )
    parts = {f"weight.{part}": value for part, value in state.as_dict(packed=True).items()}
    layout = bitsandbytes_table(name, is_nested=is_nested)
    write_library_tensors(tmp_path, layout, parts | {"weight": codes})
    found = open_files(tmp_path).weights[f"{LAYER}.weight"].read().dequantize(torch.float32)
    torch.testing.assert_close(found, functional.dequantize_4bit(codes, state), atol=1e-6, rtol=0)


def test_bitsandbytes_reads_the_same_numbers_of_8_bits(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(1)).half()
    codes, scales, _ = functional.int8_vectorwise_quant(weight)
    write_library_tensors(tmp_path, bitsandbytes_int8(), {"weight": codes, "SCB": scales})
    found = open_files(tmp_path).weights[f"{LAYER}.weight"].read().dequantize(torch.float32)
    expected = functional.int8_vectorwise_dequant(codes, scales)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


def write_library_tensors(directory: Path, layout: Layout, parts: dict[str, torch.Tensor]) -> None:
    """Write a checkpoint one of whose layers has the tensors of a library."""
    write_quantized(directory, layout)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors = {name: tensors[name] for name in tensors if not name.startswith(f"{LAYER}.")}
    tensors |= {f"{LAYER}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, path, {"format": "pt"})
