"""Reads the values of settings: text becomes the field's type, and bounds are checked."""

import math
import re
from fractions import Fraction
from typing import Any

import msgspec

from protocol.config.errors import ConfigError
from protocol.config.field_errors import json_error_text, read_field_error
from protocol.config.foreign_flags import OTHER_VALUES
from protocol.config.setting_fields import Setting

_SIZE = re.compile(r"(\d+)([.]\d+)?([kKmMgGtT])")


def converted(value: Any, setting: Setting, origin: str) -> Any:
    """Return a value with the type of its setting, reading texts as those of flags and variables.

    ConfigError: it is not a value of the setting; the text begins with `origin`.
    """
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        if setting.can_be_none:
            return None
        if setting.is_list:
            return ()
        hint = "; the word null needs quotes" if value is None and setting.can_be_text else ""
        raise ConfigError(f"{origin} must have a value{hint}")
    is_text = isinstance(value, str)
    if is_text and setting.is_bool:
        value = {"1": True, "true": True, "0": False, "false": False}.get(value.lower(), value)
    elif is_text and setting.is_json:
        value = _parse_json(value, origin)
    elif is_text and setting.is_mapping:
        value = _parse_pairs(value, origin)
    elif is_text and setting.base_type is int:
        value = _parse_size(value)
    elif setting.is_list:
        value = _parse_list(value, setting)
    if setting.is_json and isinstance(value, dict):
        try:
            _check_json(value, origin)
        except RecursionError:
            raise ConfigError(f"{origin} contains itself, or has too many levels") from None
    try:
        return msgspec.convert(value, setting.type, strict=not is_text or setting.is_json)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {_error_text(value, setting, str(error))}") from (
            None if setting.is_secret else error
        )


def _error_text(value: Any, setting: Setting, error: str) -> str:
    """Return what is wrong with a value, in the terms of the setting."""
    if setting.is_secret:
        return "a key has 1 to 256 characters; at most 16 keys"
    instead = OTHER_VALUES.get(setting.name)
    return _problem(value, setting, error) + ("" if instead is None else f"; {instead}")


def _problem(value: Any, setting: Setting, error: str) -> str:
    shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    if setting.choices:
        return f"{shown!r} is not one of {', '.join(setting.choices)}"
    if "regex" in error and setting.form is not None:
        return f"{shown!r} is not {setting.form}"
    if isinstance(value, str) and ", got `str`" in error:
        kind = "a whole number" if setting.base_type is int else "a number"
        if setting.is_bool:
            kind = "true, false, 1 or 0"
        return f"{shown!r} is not {kind}"
    if setting.is_json:
        return read_field_error(error).about("")
    return read_field_error(error, repr(shown)).reason


def _parse_size(text: str) -> int | str:
    """Read `8k` (8,000), `8K` (8,192) or `1.5G`, as vLLM does.

    A text that has no unit, or does not stand for a whole number, is returned as it is.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return text
    whole, part, unit = match.groups(default="")
    base = 1024 if unit.isupper() else 1000
    size = Fraction(whole + part) * base ** ("kmgt".index(unit.lower()) + 1)
    return int(size) if size.denominator == 1 else text


def _parse_list(value: Any, setting: Setting) -> Any:
    """Read `a,b` or a JSON list, alone or as one of several texts.

    A secret is one item, and so is a JSON object.
    """
    if isinstance(value, list | tuple):
        return [item for text in value for item in _parse_list(text, setting)]
    if not isinstance(value, str) or setting.is_secret or value.startswith("{"):
        return [value]
    if value.startswith("["):
        try:
            return msgspec.json.decode(value, type=list[str])
        except msgspec.DecodeError:
            return [value]
    return [item.strip() for item in value.split(",") if item.strip()]


def _parse_json(text: str, origin: str) -> Any:
    """Read a JSON object."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError) as error:
        raise ConfigError(f"{origin}: {text[:100]!r} {json_error_text(error)}") from error


def _check_json(value: Any, origin: str, place: str = "") -> None:
    """Raise a ConfigError for a value that JSON lacks, such as a date, or a number over 64 bits.

    Other processes and templates get the value as JSON has it.
    """
    shown = f"{origin}: {place}".rstrip(": ")
    if isinstance(value, dict):
        for name, inner in value.items():
            if not isinstance(name, str):
                reason = f"has the name {name}, which is not a text; write it in quotes"
                raise ConfigError(f"{shown} {reason}")
            _check_json(inner, origin, f"{place}.{name}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for i, inner in enumerate(value):
            _check_json(inner, origin, f"{place}[{i}]")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{shown} is {value}, which JSON lacks; write it as text, in quotes")
    elif isinstance(value, int):
        if not -(2**63) <= value < 2**64:
            raise ConfigError(f"{shown} has more than 64 bits; write it as text, in quotes")
    elif value is not None and not isinstance(value, str | float):
        kind = type(value).__name__
        raise ConfigError(f"{shown} is a {kind}, which JSON lacks; write it as text, in quotes")


def _parse_pairs(text: str, origin: str) -> dict[str, str]:
    """Read `gold=4,free=1`."""
    pairs: dict[str, str] = {}
    for item in filter(None, map(str.strip, text.split(","))):
        name, separator, value = item.rpartition("=")
        if not separator or name.strip() in pairs:
            problem = "comes twice" if separator else "is not name=value"
            raise ConfigError(f"{origin}: {item!r} {problem}")
        pairs[name.strip()] = value.strip()
    return pairs
