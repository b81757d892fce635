"""Encoders that config.json makes decoders write transformers' tokens."""

from pathlib import Path
from typing import Any

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.worker.checkpoints import SHAPE, build_checkpoint
from tests.worker.driving import drive
from tests.worker.parity import GREEDY, MAX_TOKENS, ROOMY, few_prompts, is_greedy, make_runner

LENGTH = 64
"""Positions of each model: fewer than the tokens of a step, which holds several prompts."""
SIZES: dict[str, Any] = {
    **{key: size for key, size in SHAPE.items() if key not in ("num_key_value_heads", "head_dim")},
    **{"num_hidden_layers": 1, "max_position_embeddings": LENGTH, "is_decoder": True},
}
BY_DEFAULT = "big_bird"
"""Its code takes the types of tokens from a table as long as a text, and not by position."""
OTHERS = ("bert", "bert-generation", "electra", "ernie", "megatron-bert", "roc_bert")


@pytest.mark.parametrize(
    "model_type", [BY_DEFAULT, *(pytest.param(one, marks=pytest.mark.slow) for one in OTHERS)]
)
def test_steps_may_hold_more_tokens_than_a_text(model_type: str, tmp_path: Path) -> None:
    attention = {"attention_type": "original_full"} if model_type == BY_DEFAULT else {}
    model = build_checkpoint(tmp_path, CONFIG_MAPPING[model_type](**SIZES, **attention))
    prompts = few_prompts()
    run = drive(make_runner(tmp_path, ROOMY), prompts, GREEDY, max_num_seqs=len(prompts))
    assert run.longest_step > LENGTH
    for prompt, output in zip(prompts, run.output_token_ids, strict=True):
        assert is_greedy(model, prompt, output, MAX_TOKENS)
