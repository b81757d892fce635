"""Checkpoints whose model type transformers has under another name only."""

from pathlib import Path

import pytest
import torch

from protocol.config import ModelConfig
from tests.worker.checkpoints import ARCHITECTURES, build_checkpoint, change_config, load_model
from tests.worker.driving import drive
from tests.worker.parity import (
    GREEDY,
    MAX_TOKENS,
    MODES,
    ROOMY,
    generate,
    make_prompts,
    make_runner,
)
from worker_proc.loading import proofs
from worker_proc.startup.early_refusals import refuse_model

OTHER_NAMES = [("kimi_k2", "deepseek_v3")]
OWN_CODE = {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XModel"}


def write(directory: Path, model_type: str, computed: str) -> torch.nn.Module:
    """Write a checkpoint of a type with the sizes of another type, and return its model."""
    [architecture] = [one for one in ARCHITECTURES if one.name == computed]
    model = build_checkpoint(directory, architecture.config())
    change_config(directory, model_type=model_type, auto_map=OWN_CODE)
    return model


@pytest.mark.parametrize(("model_type", "computed"), OTHER_NAMES)
def test_the_code_of_the_other_type_is_loaded(
    model_type: str, computed: str, tmp_path: Path
) -> None:
    """The checkpoint's own code, which it names, is not looked for."""
    written = write(tmp_path, model_type, computed)
    refuse_model(ModelConfig(model=str(tmp_path)))
    assert f"modeling_{computed}.py" in {path.name for path in proofs._modules_of(tmp_path)}
    model = load_model(tmp_path, "float32").model
    assert type(model) is type(written)
    assert model.config.model_type == computed
    expected = written.state_dict()
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(expected[name], value) for name, value in model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "computed"), OTHER_NAMES)
def test_tokens_are_those_of_the_other_type(model_type: str, computed: str, tmp_path: Path) -> None:
    model = write(tmp_path, model_type, computed)
    prompts = make_prompts()
    expected = [generate(model, prompt, MAX_TOKENS) for prompt in prompts]
    runner = make_runner(tmp_path, ROOMY)
    for mode in ("whole_prompts", "chunked", "prefix_cache"):
        assert drive(runner, prompts, GREEDY, **MODES[mode][1]).output_token_ids == expected, mode
