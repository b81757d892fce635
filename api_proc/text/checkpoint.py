"""Reads the text files of a checkpoint: special tokens, chat templates, sampling defaults."""

import json
import logging
from pathlib import Path
from typing import Any

import msgspec

from protocol.config import ConfigError, ModelConfig
from protocol.config.field_errors import read_field_error
from protocol.process.model_files import NULL_MODEL
from protocol.sampling import (
    MaxTokens,
    MinP,
    RepetitionPenalty,
    SuppressedTokens,
    Temperature,
    TopK,
    TopP,
)

log = logging.getLogger("troika.api")

_SPECIAL_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class SamplingDefaults(msgspec.Struct, frozen=True):
    """Values for parameters that a request omits, from the checkpoint and the settings."""

    temperature: Temperature = 1.0
    top_p: TopP = 1.0
    top_k: TopK = 0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    max_new_tokens: MaxTokens | None = None
    """Bound on the output of a request without one; None: as many tokens as fit."""
    suppress_tokens: SuppressedTokens = []
    """Tokens that are never sampled, unless a request states which ones may be."""
    max_tokens_limit: MaxTokens | None = None
    """Bound on the output of every HTTP request, from the settings alone."""

    def bounded(self, max_tokens: int) -> int:
        """Return the bound on the output of an HTTP request that asks for this one."""
        if self.max_tokens_limit is None:
            return max_tokens
        return min(max_tokens, self.max_tokens_limit)

    def suppressed(self, vocab_size: int, allowed: list[int] | None) -> list[int]:
        """Return the tokens that are never sampled in a request with these allowed tokens."""
        if allowed is not None:
            return []
        return [token_id for token_id in self.suppress_tokens if token_id < vocab_size]


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file, or an empty one if the file does not exist."""
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
    tokens = {}
    for name in (f"{kind}_token" for kind in _SPECIAL_TOKENS):
        value = config.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
    return tokens


def sampling_defaults(model: ModelConfig) -> SamplingDefaults:
    """Return the defaults of a model and its settings.

    Values in generation_config.json that are out of bounds are logged and ignored.
    """
    has_files = model.model != NULL_MODEL
    found = _checkpoint_defaults(Path(model.model)) if has_files else SamplingDefaults()
    if model.generation_config == "vllm":
        found = SamplingDefaults(suppress_tokens=found.suppress_tokens)
    if model.override_generation_config is None:
        return found
    given = msgspec.structs.asdict(model.override_generation_config)
    values = {name: value for name, value in given.items() if value is not None}
    limit = values.get("max_new_tokens")
    return msgspec.structs.replace(found, **values, max_tokens_limit=limit)


def _checkpoint_defaults(directory: Path) -> SamplingDefaults:
    config = read_json(directory / "generation_config.json")
    values = {}
    for item in msgspec.structs.fields(SamplingDefaults):
        value = None if item.name == "max_tokens_limit" else config.get(item.name)
        if value is None:
            continue
        try:
            values[item.name] = msgspec.convert(value, item.type)
        except msgspec.ValidationError as error:
            reason = read_field_error(str(error), repr(value)).reason
            log.warning("generation_config.json: %s is ignored: %s", item.name, reason)
    return SamplingDefaults(**values)


def chat_templates(directory: Path, config: dict[str, Any], override: str | None) -> dict[str, str]:
    """Return the sources of the chat templates by name; the file `override` replaces them all."""
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
