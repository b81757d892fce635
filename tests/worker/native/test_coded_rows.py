"""Rows as codes of 8 bits: their scales, and products with weights that are codes, too.

Sums of products of codes are exact, so every kernel must give the bits of a formula in PyTorch.
"""

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch
from torch import nn

from protocol.config import Quantization
from tests.worker.checkpoints import build_checkpoint
from tests.worker.modules.test_fusing import make_mlp
from tests.worker.odd_models import CONFIGS
from tests.worker.quantization.loads import load
from worker_proc.errors import UnsupportedModel
from worker_proc.modules import rounding_refusals, trial_candidates
from worker_proc.modules.coded_linear import coded_rows, coded_weight, computing_codes
from worker_proc.modules.fusing import fuse_modules
from worker_proc.modules.mlp import FusedMLP
from worker_proc.native import build as native_build
from worker_proc.native.build import build, compiler, cpu_description
from worker_proc.native.instructions import coded_stride, projection
from worker_proc.native.kernels import NativeLibrary
from worker_proc.native.packed_weights import MAX_CODED_INPUTS, Format
from worker_proc.native.structures import Activation, Epilogue

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")

SHAPES = ((96, 128), (70, 45), (34, 300), (160, 257))
"""Outputs and inputs; most fill no panel and no tile."""
NUM_ROWS = (1, 2, 3, 5, 12, 13, 16, 17, 31, 32, 33, 64, 129, 300)
ZEROS, MINUS_ZEROS, TINY, NAN, INFINITE, LARGE, EQUAL = range(3, 10)
NOTHING = 1e-30
"""Rows of lesser values count as zeros."""
TARGETS = {"haswell": "avx2", "alderlake": "avx_vnni", "skylake-avx512": "avx512bw"}
"""Compilers' names of processors with other instructions, and the flag of one that runs them."""


def random_rows(count: int, size: int) -> torch.Tensor:
    """Return rows of many sizes, and rows with unusual values."""
    generator = torch.Generator().manual_seed(size)
    rows = torch.randn(count, size, generator=generator)
    rows *= torch.logspace(-4, 4, count).unsqueeze(1)
    if count > EQUAL:
        rows[ZEROS], rows[MINUS_ZEROS], rows[EQUAL] = 0.0, -0.0, -0.7
        rows[TINY] *= 1e-38  # some of its values are below the normal ones
        rows[NAN, size // 2], rows[INFINITE, 0] = torch.nan, -torch.inf
        rows[LARGE] *= 1e37
    return rows.bfloat16()


def random_weight(shape: tuple[int, int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    weight = torch.randn(shape, generator=generator) * torch.logspace(-6, 3, shape[0]).unsqueeze(1)
    weight[1] = 0.0
    return weight.bfloat16()


@pytest.fixture
def is_fused(request: pytest.FixtureRequest) -> bool:
    """Whether the kernels add a product without rounding it first."""
    return bool(request.node.callspec.params["kernels"] != "without_fma")


def multiplied(x: torch.Tensor, y: torch.Tensor, *, is_fused: bool) -> torch.Tensor:
    """Return products in float64; unless they are fused with an addition, rounded to float32."""
    products = x.double() * y.double()
    return products if is_fused else products.float().double()


def weight_codes(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes in float64, and scales: those of the weights of w8a16."""
    greatest = weight.float().abs().amax(1, keepdim=True)
    scale = ((greatest / 127).view(torch.int32) & -1024 | 1024).view(torch.float32)
    scale = scale.where(greatest > 0, 0.0)
    codes = (weight.double() * (torch.ones(1) / scale)).nan_to_num().round()
    return codes, scale


def row_codes(rows: torch.Tensor, *, is_fused: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes in float64, and scales: NaN for rows with values that are not finite."""
    greatest = rows.float().abs().amax(1, keepdim=True)
    is_something = greatest > NOTHING
    inverse = (torch.tensor(127.0) / greatest).where(is_something, 0.0)
    codes = multiplied(rows, inverse, is_fused=is_fused).round()
    scale = (greatest / 127).where(is_something, 0.0)
    is_finite = rows.isfinite().all(1, keepdim=True)
    return codes.where(is_finite, 0.0), scale.where(is_finite, torch.nan)


def expected(
    weight: torch.Tensor, rows: torch.Tensor, bias: torch.Tensor, *, is_fused: bool = True
) -> torch.Tensor:
    """Return the products in float32, rounded where the kernels round."""
    codes, scale = row_codes(rows, is_fused=is_fused)
    coded, weight_scale = weight_codes(weight)
    whole = (codes @ coded.t()).float() * weight_scale.t()
    return (multiplied(whole, scale, is_fused=is_fused) + bias.double()).float()


def same(want: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether values are equal, NaN included."""
    return torch.equal(want.isnan(), found.isnan()) and torch.equal(
        want.nan_to_num(), found.nan_to_num()
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_have_the_bits_of_the_formula(
    shape: tuple[int, int], kernels: NativeLibrary, is_fused: bool
) -> None:
    """The number of rows is any: a row does not depend on the others, NaN or not."""
    weight, rows = random_weight(shape), random_rows(max(NUM_ROWS), shape[1])
    bias = torch.randn(shape[0]).bfloat16()
    packed = kernels.packer.pack(weight, bias, Format.INT8_FOR_CODES)
    want = expected(weight, rows, bias, is_fused=is_fused).bfloat16()
    assert want.isnan().any(1).nonzero().flatten().tolist() == [NAN, INFINITE]
    for zeros in (ZEROS, MINUS_ZEROS, TINY):
        assert torch.equal(want[zeros], bias)
    for num_rows in NUM_ROWS:
        found = kernels.project(projection(packed), rows[:num_rows], packed.num_outputs)
        assert same(want[:num_rows], found[:, : shape[0]]), num_rows


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gates_have_the_bits_of_the_formula(
    shape: tuple[int, int], kernels: NativeLibrary, is_fused: bool
) -> None:
    """The activation is what the kernels compute alone."""
    weight, rows = random_weight(shape), random_rows(40, shape[1])
    half, bias = shape[0] // 2, torch.randn(shape[0]).bfloat16()
    packed = kernels.packer.pack(weight, bias, Format.INT8_FOR_CODES, gates=True)
    instruction = projection(packed, epilogue=Epilogue.ACTIVATE, activation=Activation.SILU)
    products = expected(weight, rows, bias, is_fused=is_fused).bfloat16()
    opened = kernels.activate(products[:, :half], Activation.SILU)
    want = (opened.float() * products[:, half:].float()).bfloat16()
    for num_rows in (1, 7, 33, 40):
        found = kernels.project(instruction, rows[:num_rows], packed.num_outputs // 2)
        assert same(want[:num_rows], found[:, :half])


def test_the_greatest_sums_are_exact(kernels: NativeLibrary) -> None:
    """All codes are 127 or -127; one more input would exceed 32 bits."""
    weight = torch.ones(4, MAX_CODED_INPUTS).bfloat16()
    weight[1] *= -1
    weight[2, ::2] *= -1
    weight[3, 1:] = 0
    rows = torch.ones(3, MAX_CODED_INPUTS).bfloat16()
    rows[1] *= -1
    rows[2, ::2] *= -1
    packed = kernels.packer.pack(weight, None, Format.INT8_FOR_CODES)
    found = kernels.project(projection(packed), rows, packed.num_outputs)[:, :4]
    assert torch.equal(expected(weight, rows, torch.zeros(4)).bfloat16(), found)
    assert 2**31 - 127**2 <= 127**2 * MAX_CODED_INPUTS < 2**31


@pytest.mark.parametrize("target", TARGETS)
def test_other_instructions_give_the_same_bits(target: str, tmp_path: Path) -> None:
    if TARGETS[target] not in cpu_description().split():
        pytest.skip(f"this processor does not execute code for {target}")
    made = tmp_path / "products.so"
    source = Path(__file__).with_name("coded_products.cpp")
    headers = Path(native_build.__file__).parent
    flags = (*native_build.FLAGS, "-shared", f"-march={target}", f"-I{headers}")
    command = [str(compiler()), *flags, str(source), "-o", str(made)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    compute = ctypes.CDLL(str(made)).coded_products
    compute.argtypes = [ctypes.c_void_p] * 5 + [ctypes.c_int64] * 5
    for shape in SHAPES:
        weight, rows = random_weight(shape), random_rows(30, shape[1])
        packed = NativeLibrary(build()).packer.pack(weight, None, Format.INT8_FOR_CODES)
        assert packed.scales is not None
        stride = coded_stride(shape[1])
        coded = torch.zeros(len(rows), stride, dtype=torch.uint8)
        found = torch.zeros(len(rows), packed.num_outputs)
        tensors = (rows, coded, packed.panels, packed.scales, found)
        sizes = (len(rows), shape[1], stride, packed.num_units, packed.num_pairs)
        compute(*(tensor.data_ptr() for tensor in tensors), *sizes)
        want = expected(weight, rows, torch.full((shape[0],), 0.5))
        assert same(want, found[:, : shape[0]])


def test_modules_compute_with_the_same_codes() -> None:
    """While a kernel is proven: the same rows and weights as the kernel's."""
    rows, weight = random_rows(40, 300)[10:], random_weight((33, 300))
    codes, scale = row_codes(rows)
    assert torch.equal(coded_rows(rows), (codes * scale).float())
    assert not coded_rows(torch.zeros(2, 5)).any()
    codes, scale = weight_codes(weight)
    NativeLibrary(build()).packer.round(weight, Format.INT8_FOR_CODES)
    assert torch.equal(coded_weight(weight), (codes * scale).float())


@torch.inference_mode()
def test_an_mlp_is_compared_with_a_module_that_computes_with_codes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows with a value far off lose their other values, in the kernel and in the module alike."""
    torch.manual_seed(3)
    mlp = make_mlp(bias=True, size=576).bfloat16()
    parts = [child for child in mlp.children() if isinstance(child, nn.Linear)]
    for linear in parts[:2]:
        linear.weight[:, 5] = 0.0
    library = NativeLibrary(build())
    for linear in parts:
        library.packer.round(linear.weight.detach(), Format.INT8_FOR_CODES)
    rows = torch.randn(9, 576)
    rows[:, 5] = 400.0
    plain = mlp(rows.bfloat16()).float()
    with computing_codes(parts):
        want = mlp(rows.bfloat16()).float()
    assert torch.equal(mlp(rows.bfloat16()).float(), plain)
    # Two steps of bfloat16: processors sum in other orders, and each may round to another step.
    monkeypatch.setattr(trial_candidates, "MAX_ERROR", {torch.bfloat16: 0.008, torch.float32: 1e-5})
    model = nn.Sequential(mlp)
    assert len(fuse_modules(model, library, torch.bfloat16, format=Format.INT8_FOR_CODES)) == 1
    assert isinstance(model[0], FusedMLP)
    found = model(rows.bfloat16()).float()
    assert float((found - want).norm() / want.norm()) < 0.004
    assert float((plain - want).norm() / want.norm()) > 0.3


def test_too_many_inputs_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build_checkpoint(tmp_path, CONFIGS["llama"])
    monkeypatch.setattr(rounding_refusals, "MAX_CODED_INPUTS", 32)
    with pytest.raises(UnsupportedModel, match=r"w8a8: \S+ has \d+ inputs.* exact for at most 32"):
        load(tmp_path, Quantization.W8A8)
    load(tmp_path, Quantization.W8A16)


def test_inputs_are_counted_of_transposed_weights_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only c_proj of GPT-2's MLP has this many inputs; others have as many outputs."""
    config = CONFIGS["gpt2"]
    build_checkpoint(tmp_path, config)
    num_inputs = config.n_inner
    monkeypatch.setattr(rounding_refusals, "MAX_CODED_INPUTS", num_inputs - 1)
    with pytest.raises(UnsupportedModel, match=rf"mlp\.c_proj has {num_inputs} inputs"):
        load(tmp_path, Quantization.W8A8)
