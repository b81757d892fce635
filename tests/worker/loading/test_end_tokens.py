"""The EOS tokens of a checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from protocol.config.settings import configure
from tests.worker.checkpoints import EOS_TOKEN_ID, load_model
from worker_proc.grammar.vocabulary import Vocabulary
from worker_proc.loading.end_tokens import end_tokens
from worker_proc.startup.prepare import prepare_model

ADDED = {"added_tokens": [{"id": 0, "content": "</s>"}, {"id": 7, "content": "<|im_end|>"}]}


def write(directory: Path, config: object, tokenizer: object = ADDED) -> str:
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(directory)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"eos_token": "<|im_end|>"}, [7, 0]),
        ({"eos_token": {"content": "<|im_end|>", "lstrip": False}}, [7, 0]),
        ({"eos_token": "</s>"}, [0]),
        ({"eos_token": "x", "added_tokens_decoder": {"5": {"content": "x"}}}, [5, 0]),
        ({"eos_token": "x", "added_tokens_decoder": {"99": {"content": "x"}}}, [0]),
        ({"eos_token": "x", "added_tokens_decoder": {"a": {"content": "x"}, "6": 1}}, [0]),
        ({"eos_token": "of no token"}, [0]),
        ({"eos_token": None}, [0]),
        ([], [0]),
    ],
)
def test_the_eos_token_of_the_tokenizer_ends_outputs_too(
    tmp_path: Path, config: dict[str, Any], expected: list[int]
) -> None:
    """It is the first; a token outside the vocabulary of 8 is none."""
    assert end_tokens(write(tmp_path, config), 0, 8) == expected


@pytest.mark.parametrize(
    ("configured", "expected"), [([0, 3], [7, 0, 3]), ([3, 7], [7, 3]), (None, [7]), (-1, [7])]
)
def test_configured_tokens_follow_that_of_the_tokenizer(
    tmp_path: Path, configured: object, expected: list[int]
) -> None:
    assert end_tokens(write(tmp_path, {"eos_token": "<|im_end|>"}), configured, 8) == expected


def test_a_checkpoint_without_a_tokenizer_has_the_configured_tokens(tmp_path: Path) -> None:
    assert end_tokens(str(tmp_path), [4, 5], 8) == [4, 5]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    assert end_tokens(str(tmp_path), [4, 5], 8) == [4, 5]
    (tmp_path / "tokenizer.json").write_text("{")
    assert end_tokens(str(tmp_path), [4, 5], 8) == [4, 5]


def test_a_loaded_model_ends_at_the_token_of_its_tokenizer(
    llama_checkpoint: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(llama_checkpoint, directory)
    write(directory, {"eos_token": "<|im_end|>"})
    assert load_model(directory).eos_token_ids == [7, EOS_TOKEN_ID]


def test_another_tokenizer_of_the_configuration_has_the_end_token_and_the_texts_of_grammars(
    llama_checkpoint: Path, tmp_path: Path
) -> None:
    write(tmp_path, {"eos_token": "<|im_end|>"})
    config = configure(model=str(llama_checkpoint), tokenizer=str(tmp_path), device="cpu")
    prepared = prepare_model(config, lambda *_: None)
    assert prepared.loaded.eos_token_ids == [7, EOS_TOKEN_ID]
    assert prepared.grammars is not None
    assert prepared.grammars.vocabulary == Vocabulary([7, EOS_TOKEN_ID], str(tmp_path))
