"""Adapters that the PEFT library itself has written; skipped where it is not installed."""

from pathlib import Path
from typing import Any

import pytest
import torch

from protocol.adapters import AdapterError
from tests.worker.adapters.test_adapters import MAX_ERROR, keep, load, record
from tests.worker.bitwise import Recorder, make_texts
from tests.worker.checkpoints import build_checkpoint
from tests.worker.odd_models import CONFIGS
from worker_proc.native.build import compiler

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # of the library's own imports
]


def test_logits_are_those_of_peft_and_other_kinds_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def written(name: str, **more: Any) -> Any:
        model = build_checkpoint(tmp_path / "model", CONFIGS["llama"]).float()
        torch.manual_seed(3)
        config = peft.LoraConfig(
            r=7,
            lora_alpha=10,
            target_modules="all-linear",
            init_lora_weights=False,
            task_type="CAUSAL_LM",
            **more,
        )
        adapted = peft.get_peft_model(model, config).eval()
        adapted.save_pretrained(tmp_path / name)
        return adapted

    adapted = written("rslora", use_rslora=True)
    runner = load(tmp_path / "model", "float32")
    recorder = Recorder(make_texts(runner.facts.vocab_size, (17, 5, 40)))
    record(runner, recorder, [keep(runner, tmp_path / "rslora")], monkeypatch, [0])
    for text, token_ids in enumerate(recorder.texts):
        with torch.no_grad():
            expected = adapted(torch.tensor([token_ids])).logits[0]
        for position, row in enumerate(expected):
            found = recorder.found[text, position][: len(row)]
            assert float((found - row).norm() / row.norm()) < MAX_ERROR["float32"]
            assert int(found.argmax()) == int(row.argmax())
    for name, more in (("use_dora", {"use_dora": True}), ("modules_to_save", {})):
        extra = more or {"modules_to_save": ["lm_head"]}
        written(name, **extra)
        with pytest.raises(AdapterError, match=name):
            keep(runner, tmp_path / name)
