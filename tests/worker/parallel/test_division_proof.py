"""A division of a module is refused unless the outputs of all ranks add up to the module's."""

import pytest
import torch
from torch import nn

from worker_proc.errors import UnsupportedModel
from worker_proc.parallel.division.module_division import Division
from worker_proc.parallel.division.proof import _Call, _difference
from worker_proc.parallel.share import Section


@torch.inference_mode()
def test_parts_whose_outputs_have_another_size_are_refused() -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    rows = torch.ones(1, 2, 4)
    by_outputs = Division("mixer", columns={"0": [Section(2, 2)]}, outs={})
    with pytest.raises(UnsupportedModel, match="a part of mixer cannot be computed"):
        _difference(by_outputs, module, _Call((rows,), {}, module(rows)), num_ranks=2)
