"""The files of sentence-transformers: what they state, and how mistakes in them are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.config import ConfigError
from protocol.config.sentence_modules import (
    DenseLayer,
    SentenceModules,
    pooling_files,
    read_sentence_modules,
)
from protocol.sampling import PoolingType

FILES: dict[str, Any] = {
    "modules.json": [
        {"type": "sentence_transformers.models.Transformer", "path": ""},
        {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
        {"type": "sentence_transformers.models.Dense", "path": "2_Dense"},
        {"type": "sentence_transformers.models.Normalize", "path": "3_Normalize"},
    ],
    "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
    "2_Dense/config.json": {
        **{"in_features": 4, "out_features": 6, "bias": False},
        "activation_function": "torch.nn.modules.linear.Identity",
    },
    "sentence_bert_config.json": {"max_seq_length": 128, "do_lower_case": False},
    "config_sentence_transformers.json": {"prompts": {"query": "q: "}, "default_prompt_name": None},
}


def write(directory: Path, files: dict[str, Any]) -> Path:
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(json.dumps(content))
    return directory


def test_all_files_are_read(tmp_path: Path) -> None:
    found = read_sentence_modules(write(tmp_path, FILES))
    assert found == SentenceModules(
        pooling=PoolingType.MEAN,
        dense=(DenseLayer("2_Dense", 4, 6, False, ""),),
        max_seq_length=128,
        prompts={"query": "q: "},
    )


def test_a_checkpoint_without_files_states_nothing(tmp_path: Path) -> None:
    assert read_sentence_modules(tmp_path) == SentenceModules()


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ({"pooling_mode_lasttoken": True}, PoolingType.LAST),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, PoolingType.CLS),
        ({"pooling_mode_weightedmean_tokens": True}, PoolingType.WEIGHTED_MEAN),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, PoolingType.MEAN_SQRT_LEN),
        ({"pooling_mode": ["max"]}, PoolingType.MAX),
    ],
)
def test_every_mode_is_known(tmp_path: Path, mode: dict[str, Any], kind: PoolingType) -> None:
    assert read_sentence_modules(write(tmp_path, {"1_Pooling/config.json": mode})).pooling is kind


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("modules.json", [], r"modules.json: it is \[\], and must be a list of modules"),
        ("modules.json", [{"type": "x.Transformer", "path": "0_BERT"}], r"\[0\].path is \"0_BERT"),
        ("modules.json", [{"type": "x.CNN"}], r"\[0\].type is \"x.CNN\", and must be one of"),
        ("modules.json", [{"type": "x.Transformer", "path": "../x"}], r"\[0\].path is"),
        ("1_Pooling/config.json", {}, r"pooling_mode is \[\], and must be one of lasttoken"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True},
            r"pooling_mode is \[\"cls\", \"max\"\]",
        ),
        ("2_Dense/config.json", {"in_features": 0}, "in_features is 0, and must be an integer"),
        (
            "2_Dense/config.json",
            {"in_features": 1, "out_features": 1, "activation_function": "a.Weird"},
            "activation_function",
        ),
        ("sentence_bert_config.json", {"max_seq_length": "x"}, "max_seq_length is"),
        ("config_sentence_transformers.json", {"prompts": {"a": 1}}, "prompts is"),
        ("config_sentence_transformers.json", {"default_prompt_name": "a"}, "one of the names"),
        ("config_sentence_transformers.json", [], "must hold a JSON object"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, file: str, content: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        read_sentence_modules(write(tmp_path, FILES | {file: content}))


def test_a_file_that_a_module_needs_is_named(tmp_path: Path) -> None:
    files = {name: content for name, content in FILES.items() if name != "2_Dense/config.json"}
    with pytest.raises(ConfigError, match=r"2_Dense/config.json is missing"):
        read_sentence_modules(write(tmp_path, files))


def test_the_files_of_a_repository_are_found() -> None:
    others = ["config.json", "1_Pooling/readme.md", "onnx/config.json", "2_Dense/x.bin", "modules"]
    weights = "2_Dense/model.safetensors"
    assert set(pooling_files([*FILES, *others, weights])) == {*FILES, weights}
