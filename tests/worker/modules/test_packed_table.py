"""Embeddings whose tables stay codes: rows are those of the dequantized table, bit for bit."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from torch import nn
from transformers import Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen2MoeConfig

from protocol.config.settings import configure
from scripts.gguf.directory import make_directory
from tests.worker.gguf.gguf_files import WIDE, random_blocks, write_gguf
from tests.worker.gguf.gguf_models import MOE
from tests.worker.native.grouped_weights import CASES, Case, make_weight
from worker_proc.gguf.blocks import read_blocks
from worker_proc.gguf.types import TensorType
from worker_proc.modules.packed_linear import NativeLinear
from worker_proc.modules.packed_table import PackedTable, can_look_up
from worker_proc.native.build import build, compiler
from worker_proc.native.instructions import embedding
from worker_proc.native.kernels import NATIVE_DTYPES, NativeLibrary
from worker_proc.quantization.packing import pack_codes
from worker_proc.quantization.weight import QuantizedWeight
from worker_proc.startup.prepare import prepare_model

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.usefixtures("two_threads"),
]
NUM_ROWS, NUM_INPUTS = 70, 512


@pytest.fixture(scope="module")
def kernels() -> NativeLibrary:
    return NativeLibrary(build())


def check_rows(kernels: NativeLibrary, weight: QuantizedWeight) -> None:
    """Look up each row, in another order, alone and beside others."""
    shape = weight.codes.shape
    tokens = torch.randperm(shape[0])
    for dtype in NATIVE_DTYPES:
        packed = pack_codes(weight, None, dtype)
        assert can_look_up(packed)
        table = nn.Embedding(*shape)
        table.weight = nn.Parameter(PackedTable(kernels, packed, shape, dtype), requires_grad=False)
        expected = weight.dequantize(dtype)
        assert torch.equal(table(tokens), expected[tokens])
        assert torch.equal(table(tokens[None, :1]), expected[tokens[None, :1]])
        scaled = embedding(packed, shape[0], factor=1.7)
        found = kernels.look_up(scaled, tokens, dtype)
        assert torch.equal(found, (expected.float() * 1.7).to(dtype)[tokens])


@pytest.mark.parametrize("type", [one for one in TensorType if not one.is_plain])
def test_rows_of_gguf_blocks_are_those_of_the_dequantized_table(
    type: TensorType, kernels: NativeLibrary
) -> None:
    stored = random_blocks((NUM_ROWS, NUM_INPUTS), Type(type), scale=1.0)
    blocks = torch.from_numpy(stored).view(NUM_ROWS, -1, type.block.num_bytes)
    check_rows(kernels, read_blocks(type, blocks))


@pytest.mark.parametrize("case", [case for case in CASES if not case.has_order], ids=str)
def test_rows_are_those_of_other_kinds_of_codes(case: Case, kernels: NativeLibrary) -> None:
    check_rows(kernels, make_weight(case))


def test_unknown_tokens_get_rows_that_are_not_numbers(kernels: NativeLibrary) -> None:
    weight = make_weight(CASES[0])
    packed = pack_codes(weight, None, torch.bfloat16)
    tokens = torch.tensor([-1, 0, len(weight.codes)])
    rows = kernels.look_up(embedding(packed, len(weight.codes)), tokens, torch.bfloat16)
    assert rows.isnan().all(1).tolist() == [True, False, True]


def test_permuted_inputs_are_not_looked_up() -> None:
    [first, *_] = [case for case in CASES if case.has_order]
    assert not can_look_up(pack_codes(make_weight(first), None, torch.bfloat16))


def test_nothing_else_is_done_with_a_table(kernels: NativeLibrary) -> None:
    packed = pack_codes(make_weight(CASES[0]), None, torch.bfloat16)
    table = PackedTable(kernels, packed, torch.Size(CASES[0].shape), torch.bfloat16)
    with pytest.raises(NotImplementedError, match=r"aten.mul.* of a table in codes"):
        table * 2


MODELS: dict[str, PretrainedConfig] = {
    "tied": LlamaConfig(**WIDE, tie_word_embeddings=True),
    "untied": LlamaConfig(**WIDE),
    "scaled": Gemma3TextConfig(**WIDE, sliding_window=32, tie_word_embeddings=True),
    "modules": Qwen2MoeConfig(**WIDE, **MOE, num_experts=4, shared_expert_intermediate_size=256),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_holds_its_embedding_as_codes(name: str, tmp_path: Path) -> None:
    """One that is tied to the output layer shares its memory."""
    build()
    config = MODELS[name]
    path, _ = write_gguf(tmp_path, config, Type.Q4_K)
    prepared = prepare_model(
        configure(model=str(make_directory(path)), device="cpu"), lambda *_: None
    )
    model: Any = prepared.loaded.model
    table = model.get_input_embeddings().weight
    assert isinstance(table, PackedTable)
    assert table.packed.panels.nbytes * 2 == np.prod(table.shape)
    head = cast(NativeLinear, model.get_output_embeddings())
    is_shared = head.packed.panels.data_ptr() == table.packed.panels.data_ptr()
    assert is_shared is config.tie_word_embeddings
    whole = [part for part in model.parameters() if not part.is_meta and part.numel() > 1 << 16]
    assert all(isinstance(part, PackedTable) for part in whole)
