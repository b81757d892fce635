"""The self check of a model with experts does not depend on which experts a row is sent to."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from tests.worker.checkpoints import SHAPE, build_checkpoint
from tests.worker.parallel.ranks import Ranks
from worker_proc.calibration import self_check
from worker_proc.errors import UnsupportedModel

pytestmark = pytest.mark.slow
CONFIG = MixtralConfig(**SHAPE, num_local_experts=4, num_experts_per_tok=2)


def test_the_mixtures_are_held_where_the_first_comparison_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint(tmp_path / "model", CONFIG)
    errors = []
    compute = self_check.median_error

    def note(*logits: Any) -> float:
        errors.append(compute(*logits))
        return errors[-1] if len(errors) % 2 == 0 else 1.0

    held_errors = []
    hold = self_check.HeldMixtures

    class Noted(hold):  # type: ignore[misc, valid-type]
        @property
        def error(self) -> float:
            assert self._errors
            held_errors.append(super().error)
            return held_errors[-1]

    monkeypatch.setattr(self_check, "median_error", note)
    monkeypatch.setattr(self_check, "HeldMixtures", Noted)
    assert Ranks(tmp_path / "model", 1).runners
    assert len(errors) == 2
    assert errors[1] < 1e-4, "what was held is that of the same tokens"
    assert held_errors[0] < 1e-4


def test_other_errors_are_found_though_mixtures_are_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint(tmp_path / "model", CONFIG)
    pack = self_check.pack_step

    def without_positions(*args: Any) -> Any:
        inputs = pack(*args)
        return replace(inputs, position_ids=torch.zeros_like(inputs.position_ids))

    monkeypatch.setattr(self_check, "pack_step", without_positions)
    with pytest.raises(UnsupportedModel, match="its logits over packed rows differ"):
        Ranks(tmp_path / "model", 1)


def test_mixtures_whose_rows_depend_on_others_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_checkpoint(tmp_path / "model", CONFIG)
    compute = MixtralSparseMoeBlock.forward

    def mixing(self: MixtralSparseMoeBlock, rows: torch.Tensor) -> torch.Tensor:
        return compute(self, rows) + 3 * rows.mean(dim=-2, keepdim=True)

    monkeypatch.setattr(MixtralSparseMoeBlock, "forward", mixing)
    with pytest.raises(UnsupportedModel, match="its logits over packed rows differ"):
        Ranks(tmp_path / "model", 1)
