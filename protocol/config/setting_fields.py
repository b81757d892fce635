"""All settings, generated from the fields of `EngineConfig` and their docstrings.

`max_num_seqs` is the flag `--max-num-seqs`, the variable `TROIKA_MAX_NUM_SEQS` and the YAML key
`max_num_seqs`, which may have dashes too.
"""

import linecache
import re
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import msgspec

from protocol.config import EngineConfig, engine_config

ENV_PREFIX = "TROIKA_"
_NOTHING: tuple[Any, ...] = (None, {}, ())
"""Defaults that no text shows."""
_UNITS = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
_CHOICES = re.compile(r"\^\((\w+(?:\|\w+)+)\)\$")
_DOCUMENTED_FIELD = re.compile(r'^    (\w+): .*?\n    """(.*?)"""', re.MULTILINE | re.DOTALL)


def flag_of(name: str) -> str:
    """Return the flag of a setting."""
    return "--" + name.replace("_", "-")


class Setting(NamedTuple):
    """One field of one section."""

    section: str
    name: str
    type: Any
    default: Any

    @property
    def flag(self) -> str:
        """The command-line flag."""
        return flag_of(self.name)

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENV_PREFIX + self.name.upper()

    @property
    def base_type(self) -> Any:
        """The type without bounds and None; the first one of several."""
        return next(each for each in _union_members(self.type) if each is not type(None))

    @property
    def can_be_none(self) -> bool:
        """Whether None is a value."""
        return type(None) in _union_members(self.type)

    @property
    def can_be_text(self) -> bool:
        """Whether texts are values."""
        return str in _union_members(self.type)

    @property
    def is_bool(self) -> bool:
        """Whether the flag takes no value but has a `--no-` form."""
        return self.base_type is bool

    @property
    def is_list(self) -> bool:
        """Whether the flag may be repeated."""
        return typing.get_origin(self.base_type) is tuple

    @property
    def is_mapping(self) -> bool:
        """Whether the value is a mapping of names."""
        return typing.get_origin(self.base_type) is dict

    @property
    def is_json(self) -> bool:
        """Whether a text stands for a JSON object."""
        return any(extra.get("is_json", False) for extra in _bounds(self.type, "extra"))

    @property
    def is_secret(self) -> bool:
        """Whether no output may show the value."""
        return any(extra.get("is_secret", False) for extra in _bounds(self.type, "extra"))

    @property
    def choices(self) -> list[str]:
        """The texts that the field can hold, if they are few."""
        if hasattr(self.base_type, "__members__"):
            return [member.value for member in self.base_type]
        match = _CHOICES.fullmatch(next(_bounds(self.type, "pattern"), ""))
        return [] if match is None else match.group(1).split("|")

    @property
    def metavar(self) -> str:
        """What stands for the value in help texts."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        extra: dict[str, Any] = next(_bounds(self.type, "extra"), {})
        default = "NAME=X,..." if self.is_mapping else "TEXT"
        return str(extra.get("metavar") or {int: "N", float: "X"}.get(self.base_type, default))

    @property
    def form(self) -> str | None:
        """What a text must be, if the type has a pattern with a description."""
        return next(_bounds(self.type, "description"), None)

    @property
    def bounds(self) -> str:
        """The bounds of a number, as text."""
        names = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        found = [
            f"{sign} {self.as_text(limit)}"
            for name, sign in names.items()
            for limit in _bounds(self.type, name)
        ]
        return " and ".join(found)

    def as_text(self, value: Any) -> str:
        """Return a value as help texts show it: a number of bytes with a unit, such as 4 MiB."""
        if self.name.endswith("_bytes") and value:
            for unit, size in _UNITS.items():
                if value % size == 0:
                    return f"{value // size} {unit}"
        return str(value)


@cache
def all_settings() -> tuple[Setting, ...]:
    """Return all settings, section by section."""
    return tuple(_each_setting())


def _each_setting() -> Iterator[Setting]:
    for section in msgspec.structs.fields(EngineConfig):
        hints = typing.get_type_hints(section.type, include_extras=True)
        for item in msgspec.structs.fields(section.type):
            extra: dict[str, Any] = next(_bounds(hints[item.name], "extra"), {})
            if not extra.get("is_setting", True):
                continue
            default = item.default
            if default is msgspec.NODEFAULT:
                default = item.default_factory()
            yield Setting(section.name, item.name, hints[item.name], default)


def descriptions() -> dict[str, str]:
    """Return the docstrings of all settings by name; empty without the source, which has them."""
    source = "".join(linecache.getlines(engine_config.__file__, vars(engine_config)))
    sections, _, _ = source.partition("class EngineConfig")
    return {name: " ".join(text.split()) for name, text in _DOCUMENTED_FIELD.findall(sections)}


def default_text(setting: Setting) -> str:
    """Return the default in brackets, or nothing where the description states it."""
    default = getattr(setting.default, "value", setting.default)
    if default in _NOTHING:
        return ""
    if isinstance(default, bool):
        return f" (default: {'on' if default else 'off'})"
    return f" (default: {setting.as_text(default)})"


def _union_members(hint: Any) -> tuple[Any, ...]:
    bare = _without_metadata(hint)
    if typing.get_origin(bare) in (typing.Union, types.UnionType):
        return tuple(_without_metadata(member) for member in typing.get_args(bare))
    return (bare,)


def _without_metadata(hint: Any) -> Any:
    return typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint


def _bounds(hint: Any, name: str) -> Iterator[Any]:
    """Yield the values of one bound in a type, the members of its union and the items of a list."""
    for meta in getattr(hint, "__metadata__", ()):
        if getattr(meta, name, None) is not None:
            yield getattr(meta, name)
    bare = _without_metadata(hint)
    if typing.get_origin(bare) in (typing.Union, types.UnionType, tuple):
        for member in typing.get_args(bare):
            yield from _bounds(member, name)
