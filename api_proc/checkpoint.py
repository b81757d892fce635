"""Reads what a checkpoint's directory says about text: special tokens, templates, sampling."""

import json
import logging
from pathlib import Path
from typing import Any

import msgspec

from protocol.config import ConfigError
from protocol.sampling import MinP, RepetitionPenalty, Temperature, TopK, TopP

log = logging.getLogger("troika.api")

SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


class SamplingDefaults(msgspec.Struct, frozen=True):
    """What a request means that leaves a field out; generation_config.json may say otherwise."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, or an empty one where there is no file.

    Raises:
        ConfigError: the file holds no JSON object.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Named special tokens of a tokenizer_config.json, by name."""
    tokens = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def sampling_defaults(directory: Path) -> SamplingDefaults:
    """Defaults of generation_config.json; a value out of bounds is ignored with a warning."""
    config = read_json(directory / "generation_config.json")
    values = {}
    for item in msgspec.structs.fields(SamplingDefaults):
        value = config.get(item.name)
        if value is None:
            continue
        try:
            values[item.name] = msgspec.convert(value, item.type)
        except msgspec.ValidationError as error:
            log.warning("generation_config.json: %s ignored: %s", item.name, error)
    return SamplingDefaults(**values)


def chat_templates(directory: Path, config: dict[str, Any], override: str | None) -> dict[str, str]:
    """Sources of the chat templates by name; the usual one is "default".

    Args:
        config: content of tokenizer_config.json.
        override: file that replaces them all.

    Raises:
        ConfigError: `override` cannot be read.
    """
    if override is not None:
        try:
            return {"default": Path(override).read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template: cannot read {override}: {error}") from error
    templates = _named(config.get("chat_template"))
    templates |= _named(read_json(directory / "chat_template.json").get("chat_template"))
    if (file := directory / "chat_template.jinja").is_file():
        templates["default"] = file.read_text(encoding="utf-8")
    for file in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    return templates


def _named(value: Any) -> dict[str, str]:
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list):
        try:
            return {item["name"]: item["template"] for item in value}
        except (KeyError, TypeError) as error:
            raise ConfigError("chat_template: an entry lacks its name or its template") from error
    return {}
