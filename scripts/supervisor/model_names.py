"""Resolves a model's name: one of the engine's own models, a directory, a file, or a hub's name."""

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from protocol.config import ConfigError, ModelConfig
from scripts.hub.messages import is_gguf
from worker_proc.gguf.parts import part_name

_SCRIPTS_DIR = Path(__file__).resolve().parent.parent
BUNDLED_MODELS = {
    "demo": _SCRIPTS_DIR / "demo_model",
    "demo-chat": _SCRIPTS_DIR / "demo_chat_model",
}
"""The models that come with the engine, by name."""
_HUB_NAME = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}(:\w[\w.-]{0,63})?")
"""Names of models on the hub, with the quantization of one of their GGUF files after a colon."""


def resolve(model: ModelConfig) -> ModelConfig:
    """Make local names of models absolute paths; models of the hub keep their names.

    A GGUF file becomes a directory later (`scripts.hub.messages.gguf_files`).

    ConfigError: a name is not a model's, local or on the hub, or a path has no model.
    """
    directory, name = _place("model", model.model)
    if model.revision is not None and directory is not None:
        raise ConfigError(
            f"revision {model.revision} belongs to a model of the hub, and {model.model} is local"
        )
    draft = model.speculative_model
    if draft is not None:
        draft = str(_place("speculative_model", draft)[0] or draft)
    return msgspec.structs.replace(
        model,
        given_model=model.model,
        model=model.model if directory is None else str(directory),
        served_model_name=model.served_model_name or (name,),
        speculative_model=draft,
    )


def with_directories(model: ModelConfig, directories: Mapping[str, str]) -> ModelConfig:
    """Replace names of the hub by the directories of their snapshots."""
    return msgspec.structs.replace(model, **directories)


def local_hint(name: str) -> str:
    """Suggest the directory whose path is most like a name, if there is a similar one."""
    directory = Path(name).absolute()
    close = difflib.get_close_matches(directory.name, _names_in(directory.parent), n=1, cutoff=0.7)
    return f"; did you mean {directory.with_name(close[0])}?" if close else ""


def _place(setting: str, given: str) -> tuple[Path | None, str]:
    """Return a model's directory or GGUF file (None: it is on the hub), and its name in the API."""
    bundled = BUNDLED_MODELS.get(given)
    directory = bundled or Path(given).absolute()
    if is_gguf(directory) and directory.is_file():
        return directory, _gguf_model(setting, directory)
    if not directory.exists() and _HUB_NAME.fullmatch(given):
        return None, given
    if not (directory / "config.json").is_file():
        raise ConfigError(_why_not_a_model(setting, directory, given))
    return directory, given if bundled else directory.name


def _gguf_model(setting: str, path: Path) -> str:
    """Return the name of the model that a file has, alone or as the first of several."""
    part = part_name(path.name)
    if part.number > 1:
        raise ConfigError(
            f"{setting} {path} is part {part.number} of {len(part.names)};"
            f" give the first one, {part.names[0]}"
        )
    return part.model


def _why_not_a_model(setting: str, directory: Path, given: str) -> str:
    """Return a line with the error in a path, and a suggestion."""
    what = f"{setting} {directory}"
    if directory.is_dir():
        has_gguf = any(is_gguf(name) for name in _names_in(directory))
        give = "one of its GGUF files" if has_gguf else "a directory in Hugging Face format"
        return f"{what} has no config.json; give {give}"
    if directory.exists():
        return f"{what} is a file; give a directory that holds config.json, or a .gguf file"
    hint = local_hint(str(directory)) or _bundled_hint(given)
    return f"{what} does not exist" + (
        hint
        or "; give a checkpoint directory, a model of the Hugging Face hub as ORGANIZATION/NAME, "
        "a GGUF file, 'demo', 'demo-chat' or 'null'"
    )


def _bundled_hint(name: str) -> str:
    """Suggest the model that needs no path whose name is most like a name, if one is similar."""
    close = difflib.get_close_matches(name, (*BUNDLED_MODELS, "null"), n=1, cutoff=0.7)
    return f"; did you mean {close[0]}?" if close else ""


def _names_in(directory: Path) -> list[str]:
    try:
        return [entry.name for entry in os.scandir(directory)]
    except OSError:
        return []
