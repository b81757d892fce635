"""Weights that stand on the left of products: found, packed, and the same bits for each column."""

import pytest
import torch
from torch import nn

from worker_proc.modules.left_factors import (
    LeftLayer,
    ObservedProducts,
    pack_left_factors,
    pack_right_factors,
)
from worker_proc.native.kernels import NativeLibrary

NUM_TOKENS = 21


class Mixer(nn.Module):
    """Multiplies columns by the weight of a layer, and by matrices of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.dt_proj = nn.Linear(12, 40)
        self.in_proj: nn.Module = nn.Linear(40, 40)
        self.heads = nn.Parameter(torch.randn(2, 18, 20))
        self.mixing = nn.Parameter(torch.randn(18, 18))
        self.decays = nn.Parameter(torch.randn(40, 12))

    def forward(self, rows: torch.Tensor, *, mixes: bool = False) -> torch.Tensor:
        """Return `[2, 1, 18, T]` for `[1, T, 12]`."""
        columns = self.dt_proj.weight @ rows.transpose(1, 2) + self.dt_proj.bias[:, None]
        columns = columns * self.decays.exp().sum(1)[:, None]
        columns = self.in_proj(columns.transpose(1, 2)).transpose(1, 2)
        split = columns.reshape(1, 2, 20, -1).transpose(0, 1)
        out = self.heads[:, None] @ split
        return (out.transpose(2, 3) @ self.mixing).transpose(2, 3) if mixes else out


@pytest.fixture
def mixer() -> Mixer:
    torch.manual_seed(3)
    return Mixer().requires_grad_(False)


def observed(mixer: Mixer, *, mixes: bool = False) -> ObservedProducts:
    with torch.inference_mode(), ObservedProducts(mixer) as products:
        mixer(torch.zeros(1, 3, 12), mixes=mixes)
    return products


def test_weights_in_products_are_found(mixer: Mixer) -> None:
    """A weight of a layer that is called is not among them, nor one in no product."""
    products = observed(mixer)
    assert products.left == {"dt_proj.weight", "heads"}
    assert products.others == set()
    products = observed(mixer, mixes=True)
    assert products.left == {"dt_proj.weight", "heads"}
    assert products.others == {"mixing"}


def test_a_part_of_a_weight_is_not_taken_for_it(mixer: Mixer) -> None:
    columns = torch.zeros(18, 2)
    with torch.inference_mode(), ObservedProducts(mixer) as products:
        _ = mixer.mixing.t() @ columns
        _ = mixer.heads[:1] @ torch.zeros(20, 2)
        _ = mixer.dt_proj.weight[:12] @ torch.zeros(12, 2)
    assert products.left == set()
    assert products.others == {"mixing", "heads"}


@torch.inference_mode()
def test_packed_weights_give_each_column_its_bits(
    mixer: Mixer, sampling_library: NativeLibrary | None
) -> None:
    mixer.in_proj = nn.Identity()  # torch's products of rows depend on their number
    rows = torch.randn(1, NUM_TOKENS, 12)
    expected, left = mixer(rows), observed(mixer).left
    pack_left_factors(mixer, left, sampling_library)
    assert isinstance(mixer.dt_proj, LeftLayer)
    assert {name for name, _ in mixer.named_parameters()} == {"dt_proj.bias", "mixing", "decays"}
    found = mixer(rows)
    torch.testing.assert_close(found, expected)
    for first, count in ((0, 1), (1, 1), (2, 16), (4, 5)):
        part = mixer(rows[:, first : first + count])
        assert torch.equal(part, found[..., first : first + count])


def test_a_packed_weight_refuses_all_else(
    mixer: Mixer, sampling_library: NativeLibrary | None
) -> None:
    pack_left_factors(mixer, ["heads"], sampling_library)
    with pytest.raises(TypeError, match="not indexed by 0"):
        mixer.heads[0]
    with pytest.raises(TypeError, match=r"packed weights \(2,\) and columns \(20, 3\)"):
        mixer.heads @ torch.zeros(20, 3)


class Gates(nn.Module):
    """Multiplies the rows of heads by matrices of each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 20, 18))
        self.bias = nn.Parameter(torch.randn(3, 18))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return `[3, T, 18]` for `[3, T, 20]`."""
        return torch.baddbmm(self.bias[:, None], rows, self.weight)


@torch.inference_mode()
def test_packed_weights_of_heads_give_each_row_its_bits(
    sampling_library: NativeLibrary | None,
) -> None:
    torch.manual_seed(3)
    gates = nn.Sequential(Gates()).requires_grad_(False)
    rows = torch.randn(3, NUM_TOKENS, 20)
    with ObservedProducts(gates) as products:
        expected = gates(rows)
    assert (products.right, products.added) == ({"0.weight"}, {"0.bias"})
    pack_right_factors(gates, products.right, products.added, sampling_library)
    assert not list(gates.parameters())
    found = gates(rows)
    torch.testing.assert_close(found, expected)
    for first, count in ((0, 1), (1, 1), (2, 16), (4, 5)):
        assert torch.equal(gates(rows[:, first : first + count]), found[:, first : first + count])
    with pytest.raises(TypeError, match="a packed weight has no matmul"):
        torch.matmul(rows, gates[0].weight)
