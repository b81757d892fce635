"""Layers that count rows in place of positions are given positions, or refused."""

from pathlib import Path

import pytest
import torch

from tests.worker.checkpoints import ARCHITECTURES, build_checkpoint
from tests.worker.parity import make_runner
from worker_proc.errors import UnsupportedModel
from worker_proc.loading.row_positions import PackedPositions

LLAMA4 = next(one for one in ARCHITECTURES if one.name == "llama4")


def test_rows_lack_what_their_numbers_do_to_their_positions() -> None:
    cache = PackedPositions(torch.tensor([[7, 8, 0, 1, 30]]))
    assert cache.get_seq_length(3).tolist() == [7, 7, -2, -2, 26]


def test_a_model_that_would_count_rows_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint(tmp_path, LLAMA4.config())
    no_offset = torch.zeros(5, dtype=torch.long)
    monkeypatch.setattr(
        PackedPositions,
        "get_seq_length",
        lambda self, layer_idx=0: no_offset if self._missing.dim() else self._missing,
    )
    with pytest.raises(UnsupportedModel, match=r"self_attn counts rows in place of positions"):
        make_runner(tmp_path, 50)
