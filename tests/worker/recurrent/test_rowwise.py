"""Functions of single values give each of them the same bits, whatever rows are beside it."""

import torch
from torch import nn
from transformers.activations import ACT2FN

from worker_proc.modules.experts.router import RowBlocks
from worker_proc.recurrent.rowwise import compute_activations_rowwise, computes_rowwise

WIDTH = 5  # rows of it end at all places of a vector


def make_rows(width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1000, width, generator=generator) * 3


def test_a_router_with_an_odd_number_of_experts_gives_a_row_its_bits() -> None:
    blocks = RowBlocks(lambda rows: (rows.sigmoid(),), WIDTH)
    rows = make_rows(WIDTH)
    (together,) = blocks(rows)
    few = [blocks(some)[0] for some in rows.split(16)]
    assert torch.equal(together, torch.cat(few))


def test_activations_give_a_row_its_bits() -> None:
    rows = make_rows(65)
    for name in ("quick_gelu", "sigmoid", "mish", "tanh", "relu"):
        function = nn.Sequential(ACT2FN[name])
        compute_activations_rowwise(function)
        together = function(rows)
        assert torch.equal(together, torch.cat([function(row) for row in rows.split(1)])), name
        assert computes_rowwise(function[0]) == (name != "relu")


def test_functions_of_several_values_stay_as_they_are() -> None:
    for module in (nn.GLU(dim=1), nn.Softmax(dim=1)):
        compute_activations_rowwise(nn.Sequential(module))
        assert not computes_rowwise(module)
