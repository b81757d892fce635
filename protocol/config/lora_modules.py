"""Adapters that are named when the engine is started: the setting `lora_modules`."""

import msgspec

from protocol.adapters import AdapterName, AdapterPath
from protocol.config.field_errors import json_error_text


class LoraModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter that is named when the engine is started."""

    name: AdapterName
    path: AdapterPath
    base_model_name: str | None = None
    """Shown as its parent in /v1/models."""


def parse_lora_module(text: str) -> LoraModule:
    """Read `name=path` or a JSON object with name, path and base_model_name, as vLLM does.

    ValueError: the text is neither.
    """
    if text.startswith("{"):
        try:
            return msgspec.json.decode(text, type=LoraModule)
        except msgspec.DecodeError as error:
            raise ValueError(json_error_text(error, repr(text))) from error
    name, separator, path = text.partition("=")
    try:
        return msgspec.convert({"name": name, "path": path}, LoraModule)
    except msgspec.ValidationError as error:
        what = json_error_text(error) if separator else "is not name=path"
        raise ValueError(f"{text!r}: {what}") from error
