"""What the run on the meta device finds in models whose code differs from that of most others."""

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MoshiConfig,
    PretrainedConfig,
    Qwen4ExpTextConfig,
)

from tests.families.configs import FAMILIES, small_config
from worker_proc.attention.probed_layer import ProbedLayer
from worker_proc.loading.inspection import InspectedModel, inspect_config
from worker_proc.loading.kept_rows import keep_rows


def inspect(config: PretrainedConfig, directory: Path) -> InspectedModel:
    config.save_pretrained(directory)
    return inspect_config(str(directory), "float32", torch.device("cpu"))


def names_of(layers: list[ProbedLayer]) -> list[str]:
    return [layer.module_name for layer in layers]


def test_a_weight_that_other_code_multiplies_by_is_kept(tmp_path: Path) -> None:
    """Its module is not called; packed, it would have no numbers."""
    probed = inspect(small_config("longcat_flash"), tmp_path).probed
    assert probed.read_linears == tuple(f"model.layers.{i}.mlp.router.classifier" for i in (0, 1))


def test_layers_that_text_does_not_reach_are_not_missed(tmp_path: Path) -> None:
    """The middle one attends to images."""
    probed = inspect(FAMILIES["mllama"](), tmp_path).probed
    layers = "model.language_model.layers"
    assert names_of(probed.layers) == [f"{layers}.{i}.self_attn" for i in (0, 2)]
    assert f"{layers}.1" in probed.unused_modules


def test_a_part_that_is_called_for_texts_is_built_without_its_towers(tmp_path: Path) -> None:
    probed = inspect(small_config("phi4_multimodal"), tmp_path).probed
    part = "model.embed_tokens_extend"
    assert part not in probed.unused_modules
    assert {f"{part}.image_embed", f"{part}.audio_embed"} <= set(probed.unused_modules)


def test_attention_without_a_cache_is_found(tmp_path: Path) -> None:
    probed = inspect(small_config("openai-gpt"), tmp_path).probed
    assert names_of(probed.layers) == ["transformer.h.0.attn", "transformer.h.1.attn"]
    assert not probed.has_own_attention


@pytest.mark.parametrize(("window", "length"), [(13, 13), (256, 256), (300, 256)])
def test_a_context_ends_where_a_cache_would_drop_what_attention_sees(
    window: int, length: int, tmp_path: Path
) -> None:
    config = small_config("moshi")
    assert isinstance(config, MoshiConfig)
    config.sliding_window, config.max_position_embeddings = window, 256
    assert inspect(config, tmp_path).model_len == length


@pytest.mark.parametrize(("chosen", "length"), [(24, 24), (2000, 1024)])
def test_a_context_ends_where_indexers_choose_some_tokens_only(
    chosen: int, length: int, tmp_path: Path
) -> None:
    """The second layer takes the choice of the first one."""
    config = small_config("glm_moe_dsa")
    config.index_topk = chosen
    assert inspect(config, tmp_path).model_len == length


def test_a_context_ends_after_the_blocks_that_indexers_select(tmp_path: Path) -> None:
    """The limit is also behind the tokens after the last whole block, which are always chosen."""
    config = FAMILIES["qwen4_exp_text"]()
    assert isinstance(config, Qwen4ExpTextConfig)
    config.indexer_budget = 24
    assert inspect(config, tmp_path).model_len == 24 + 3


class _WithoutRows(LlamaForCausalLM):
    """A model whose forward computes logits of all rows."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        logits: torch.Tensor = self.lm_head(self.model.embed_tokens(input_ids))
        return logits


def test_a_forward_that_computes_all_logits_is_given_rows() -> None:
    sizes = {"num_hidden_layers": 0, "vocab_size": 11, "hidden_size": 8, "num_attention_heads": 1}
    model = _WithoutRows(LlamaConfig(**sizes))
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    expected = model(tokens)
    keep_rows(model)
    assert isinstance(model.lm_head, nn.Linear)
    for kept in ([4], [0, 2]):
        found = model(input_ids=tokens, logits_to_keep=torch.tensor(kept))
        torch.testing.assert_close(found, expected[:, kept])
    assert torch.equal(model(input_ids=tokens), expected)
