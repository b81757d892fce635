"""Models with nothing but experts, random rows for them, and what their own forward computes."""

import inspect

import torch
from torch import nn

HIDDEN_SIZE, SIZE = 74, 44
"""Not multiples of a vector."""
NUM_EXPERTS, NUM_CHOSEN = 9, 3
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


class Holder(nn.Module):
    """A model with nothing but experts."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts


def randomized(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0.0, 1.5 * parameter.shape[-1] ** -0.5)
    return module.to(dtype).eval()


def rows_and_choices(
    num_rows: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = torch.randn(num_rows, HIDDEN_SIZE) * torch.logspace(-1, 1, num_rows).unsqueeze(1)
    index = torch.rand(num_rows, NUM_EXPERTS).argsort(dim=-1)[:, :NUM_CHOSEN]
    return rows.to(dtype), index, torch.rand(num_rows, NUM_CHOSEN) + 0.1


def definition(module: nn.Module, *args: torch.Tensor) -> torch.Tensor:
    """Return what the forward of a module's class computes."""
    out: torch.Tensor = inspect.unwrap(type(module).forward)(module, *args)
    return out


def assert_close(found: torch.Tensor, want: torch.Tensor) -> None:
    assert (found.shape, found.dtype) == (want.shape, want.dtype)
    error = (found.float() - want.float()).norm(dim=-1) / want.float().norm(dim=-1)
    assert float(error.max()) < TOLERANCE[want.dtype]
