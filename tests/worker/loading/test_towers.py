"""Towers that need a library are not built, so that the text of such checkpoints is served."""

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, Gemma3nConfig
from transformers.models.inkling import modeling_inkling
from transformers.models.inkling.configuration_inkling import InklingConfig
from transformers.utils import is_timm_available

from tests.worker.checkpoints import ARCHITECTURES, VOCAB_SIZE, build_checkpoint
from tests.worker.driving import drive
from tests.worker.parity import GREEDY, MAX_TOKENS, generate_all, make_prompts, make_runner
from tests.worker.score_term_models import SCORE_TERMS
from worker_proc.errors import UnsupportedModel
from worker_proc.loading.unbuilt_parts import (
    MissingTower,
    building_without_libraries,
    without_libraries,
)

GEMMA3N = next(one for one in ARCHITECTURES if one.name == "gemma3n_shared")
INKLING = next(one for one in SCORE_TERMS if one.name == "inkling_text")


@pytest.mark.skipif(is_timm_available(), reason="the tower's library is installed")
def test_a_checkpoint_whose_tower_lacks_its_library_is_served(tmp_path: Path) -> None:
    text = GEMMA3N.config().to_dict()
    audio = {"hidden_size": 32, "conf_num_attention_heads": 2, "conf_num_hidden_layers": 1}
    sizes = {"vision_soft_tokens_per_image": 4, "audio_soft_tokens_per_image": 4}
    config = Gemma3nConfig(
        text_config=text,
        audio_config=audio | {"vocab_size": 8, "vocab_offset": VOCAB_SIZE - 8},
        vision_config={"hidden_size": 32, "vocab_size": 8, "vocab_offset": VOCAB_SIZE - 16},
        **sizes,
    )
    with building_without_libraries():
        model = build_checkpoint(tmp_path, config)
    assert "from_config" not in AutoModel.__dict__
    assert any(isinstance(module, MissingTower) for module in model.modules())
    model.set_attn_implementation("eager")
    prompts = [[token % (VOCAB_SIZE - 20) for token in prompt] for prompt in make_prompts()[:6]]
    expected = generate_all(model, prompts, MAX_TOKENS)
    run = drive(make_runner(tmp_path, 200), prompts, GREEDY, max_num_seqs=4)
    assert run.output_token_ids == expected


@pytest.mark.slow
@pytest.mark.skipif(find_spec("scipy") is not None, reason="the tower's library is installed")
def test_a_tower_whose_class_lacks_a_library_is_left_out(tmp_path: Path) -> None:
    """Inkling's class builds it itself, not `AutoModel`."""
    tokens = ("image_token_id", "audio_token_id", "image_bos_token_id", "audio_bos_token_id")
    config = InklingConfig(
        text_config=INKLING.config().to_dict(),
        vision_config={"hidden_size": 32, "num_hidden_layers": 2, "patch_size": 14},
        **{name: VOCAB_SIZE - 1 - number for number, name in enumerate(tokens)},
    )
    own = modeling_inkling.InklingVisionModel
    model = without_libraries(lambda: build_checkpoint(tmp_path, config))
    assert modeling_inkling.InklingVisionModel is own
    model.set_attn_implementation("eager")
    prompts = [[token % (VOCAB_SIZE - 20) for token in prompt] for prompt in make_prompts()[:6]]
    expected = generate_all(model, prompts, MAX_TOKENS)
    run = drive(make_runner(tmp_path, 200), prompts, GREEDY, max_num_seqs=4)
    assert run.output_token_ids == expected


def test_other_missing_libraries_are_reported() -> None:
    def build() -> None:
        raise ModuleNotFoundError("No module named 'xyz'")

    with pytest.raises(ImportError, match="xyz"):
        without_libraries(build)


def test_a_missing_part_that_text_reaches_is_refused_with_the_reason() -> None:
    tower = MissingTower("timm_wrapper: TimmWrapperModel requires the timm library")
    with pytest.raises(UnsupportedModel, match="requires the timm library"):
        tower(torch.zeros(1))
