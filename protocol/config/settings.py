"""Reads an EngineConfig from flags, environment, YAML file and defaults, in this precedence.

Everything here is generated from the fields of `EngineConfig` and their docstrings: `max_num_seqs`
is the flag `--max-num-seqs`, the variable `TROIKA_MAX_NUM_SEQS` and the YAML key `max_num_seqs`,
which may have dashes too.
"""

import argparse
import contextlib
import ctypes
import difflib
import linecache
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from protocol.config import ConfigError, EngineConfig, engine_config, validate
from protocol.config.field_errors import read_field_error
from protocol.config.foreign_flags import INSTEAD, OTHER_VALUES
from protocol.config.gpu_defaults import GPU_NODES, computes_on_gpu, gpu_defaults

ENV_PREFIX = "TROIKA_"
NOTHING: tuple[Any, ...] = (None, {}, ())
"""Defaults that no text shows."""
_LIKENESS = 0.75
"""Least similarity, from 0 to 1, between a wrong name and the one that is suggested."""
_SIZE = re.compile(r"(\d+)([.]\d+)?([kKmMgGtT])")
_FLAG = re.compile(r"-(?!\d)")
"""The beginning of a flag, and not that of a negative number."""
_CHOICES = re.compile(r"\^\((\w+(?:\|\w+)+)\)\$")
_TAKES_NO_VALUE = re.compile(r"argument ([^\s/]+)\S*: ignored explicit argument .*")
_NEEDS_VALUE = re.compile(r"argument (\S+): expected (one|at least one) argument")
_KEY = re.compile(rb"""^(["']?)([\w-]+)\1[ \t]*:(?=\s|$)""", re.MULTILINE)
"""A top-level key of a YAML mapping."""
_DOCUMENTED_FIELD = re.compile(r'^    (\w+): .*?\n    """(.*?)"""', re.MULTILINE | re.DOTALL)


class _Given(NamedTuple):
    """A setting that the user gives."""

    value: Any
    written: str
    """The name under which it was given: a flag, a variable or a key of a file."""
    file: str | None = None

    @property
    def origin(self) -> str:
        return self.written if self.file is None else f"{self.written} in {self.file}"


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
    def is_bool(self) -> bool:
        """Whether the flag takes no value but has a `--no-` form."""
        return _base_type(self.type) is bool

    @property
    def is_list(self) -> bool:
        """Whether the flag may be repeated."""
        return typing.get_origin(_base_type(self.type)) is tuple

    @property
    def is_secret(self) -> bool:
        """Whether no output may show the value."""
        return any(extra.get("is_secret", False) for extra in _bounds(self.type, "extra"))

    @property
    def choices(self) -> list[str]:
        """The texts that the field can hold, if they are few."""
        base = _base_type(self.type)
        if hasattr(base, "__members__"):
            return [member.value for member in base]
        match = _CHOICES.fullmatch(next(_bounds(self.type, "pattern"), ""))
        return [] if match is None else match.group(1).split("|")

    @property
    def metavar(self) -> str:
        """What stands for the value in help texts."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        base = _base_type(self.type)
        if typing.get_origin(base) is dict:
            return "NAME=X,..."
        extra: dict[str, Any] = next(_bounds(self.type, "extra"), {})
        return str(extra.get("metavar") or {int: "N", float: "X"}.get(base, "TEXT"))

    @property
    def bounds(self) -> str:
        """The bounds of a number, as text."""
        names = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
        found = [
            f"{sign} {limit}" for name, sign in names.items() for limit in _bounds(self.type, name)
        ]
        return " and ".join(found)


def settings() -> Iterator[Setting]:
    """Return all settings, section by section."""
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


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per setting, grouped by section, and `--config`."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings by name")
    groups = {
        item.name: parser.add_argument_group(item.name, (item.type.__doc__ or "").split("\n")[0])
        for item in msgspec.structs.fields(EngineConfig)
    }
    texts = descriptions()
    for setting in settings():
        text = texts.get(setting.name, "") + default_text(setting)
        options: dict[str, Any] = {
            "dest": setting.name,
            "default": argparse.SUPPRESS,
            "help": text.replace("%", "%%"),
        }
        if setting.is_bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["metavar"] = setting.metavar
        if setting.is_list:
            # A secret takes one word: others are not swallowed, such as the model's name.
            options |= {"action": "extend", "nargs": 1 if setting.is_secret else "+"}
        groups[setting.section].add_argument(setting.flag, **options)


def default_text(setting: Setting) -> str:
    """Return the default in brackets, or nothing where the description states it."""
    default = getattr(setting.default, "value", setting.default)
    if default in NOTHING:
        return ""
    if isinstance(default, bool):
        return f" (default: {'on' if default else 'off'})"
    return f" (default: {default})"


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage."""

    def parse_known_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse flags and files in any order; with `--`, all files are after it."""
        args = sys.argv[1:] if args is None else args
        if "--" in args:  # argparse would read the files after it as flags
            return self.parse_known_args(args, namespace)
        return super().parse_known_intermixed_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        match = _NEEDS_VALUE.fullmatch(message)
        if match is not None:
            message = f"{match.group(1)} needs a value"
        match = _TAKES_NO_VALUE.fullmatch(message)
        if match is not None:
            message = f"{match.group(1)} takes no value"
        print(f"troika: {message}", file=sys.stderr)
        sys.exit(2)


def resolve(
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: str | None = None,
    gpu_nodes: Sequence[str] = GPU_NODES,
) -> EngineConfig:
    """Merge flags, `TROIKA_*` variables and a YAML file; ConfigError: a name or value is wrong."""
    given = _read(flags, environ, file)
    try:
        return _merge(given, gpu_nodes)
    except ConfigError as error:
        raise ConfigError(error.spelled(partial(_spell, given))) from error


def _read(
    flags: Mapping[str, Any], environ: Mapping[str, str], file: str | None
) -> dict[str, _Given]:
    """Return the settings that are given, those that win over others, by name."""
    known = {setting.name: setting for setting in settings()}
    given: dict[str, _Given] = {}
    for key, value in ({} if file is None else _read_yaml(file)).items():
        name = _known_name(str(key).replace("-", "_"), known, file)
        if name in given:
            raise ConfigError(f"{given[name].written} and {key} in {file} are the same setting")
        given[name] = _Given(value, str(key), file)
    for variable, text in environ.items():
        if variable.startswith(ENV_PREFIX):
            given[_known_variable(variable, known)] = _Given(text, variable)
    for name, value in flags.items():
        _known_name(name, known, "the arguments")
        given[name] = _Given(value, known[name].flag)
    return given


def _merge(given: Mapping[str, _Given], gpu_nodes: Sequence[str]) -> EngineConfig:
    known = {setting.name: setting for setting in settings()}
    tree: dict[str, dict[str, Any]] = {}
    for name, one in given.items():
        tree.setdefault(known[name].section, {})[name] = _convert(
            one.value, known[name], one.origin
        )
    model = msgspec.convert(tree, EngineConfig).model
    if model.model != "null" and computes_on_gpu(model.device, gpu_nodes):
        tree["scheduler"] = gpu_defaults(tree.get("scheduler", {}))
    return validate(msgspec.convert(tree, EngineConfig))


def configure(**values: Any) -> EngineConfig:
    """Build a configuration from keywords alone, for embedding; errors name the keywords."""
    given = _read(values, {}, None)
    return _merge({name: one._replace(written=name) for name, one in given.items()}, GPU_NODES)


def _spell(given: Mapping[str, _Given], name: str) -> str:
    """Return the name of a setting as the user has written it.

    One that is not given is written as a key where keys alone are given, and else as a flag.
    """
    if name in given:
        return given[name].written
    keys = [one.written for one in given.values() if one.file is not None]
    if len(keys) < len(given) or not keys:
        return flag_of(name)
    return name.replace("_", "-") if any("-" in key for key in keys) else name


def speller(arguments: argparse.Namespace) -> Callable[[str], str]:
    """Return what writes the names of settings as a parsed command line has them."""
    given: dict[str, _Given] = {}
    with contextlib.suppress(ConfigError):  # the file has changed meanwhile
        given = _read(_flags_in(arguments), os.environ, vars(arguments).get("config"))
    return partial(_spell, given)


def parse_args(parser: argparse.ArgumentParser, argv: Sequence[str]) -> EngineConfig:
    """Parse a command line that `add_flags` described; an error ends the program, as argparse.

    Variables with secrets are erased, so that /proc/PID/environ does not show them.
    """
    parsed, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        options = [
            option
            for action in parser._actions
            if action.help is not argparse.SUPPRESS
            for option in action.option_strings
        ]
        name = unknown[0].split("=")[0]
        if not _FLAG.match(name):
            meant = f"; did you mean --{name}?" if f"--{name}" in options else ""
            parser.error(f"unknown argument {name}{meant}; see --help")
        names = dict.fromkeys(word.split("=")[0] for word in unknown if _FLAG.match(word))
        texts = [f"unknown flag {name}{hint(name, options)}" for name in names]
        parser.error("\ntroika: ".join(texts) + "; see --help")
    try:
        return resolve(_flags_in(parsed), os.environ, vars(parsed).get("config"))
    except ConfigError as error:
        parser.error(str(error))
    finally:
        for setting in settings():
            if setting.is_secret:
                _erase_variable(setting.variable)


def _flags_in(arguments: argparse.Namespace) -> dict[str, Any]:
    names = {setting.name for setting in settings()}
    return {name: value for name, value in vars(arguments).items() if name in names}


def _erase_variable(name: str) -> None:
    """Unset a variable, and overwrite the memory that /proc/PID/environ shows."""
    if name not in os.environ:
        return
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_void_p
    address = libc.getenv(os.fsencode(name))
    if address is not None:
        ctypes.memset(address, 0, len(os.fsencode(os.environ[name])))
    del os.environ[name]


def _read_yaml(file: str) -> dict[Any, Any]:
    try:
        text = Path(file).read_bytes()
        content = msgspec.yaml.decode(text)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except msgspec.DecodeError as error:
        reason = " ".join(str(error).replace('in "<byte string>", ', "").split())
        raise ConfigError(f"{file} is not valid YAML: {reason}") from error
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a mapping of setting names to values")
    keys = [key for _, key in _KEY.findall(text)]
    for key in content:
        if keys.count(str(key).encode()) > 1:
            raise ConfigError(f"{file} has {key} twice")
    return content


def _known_name(name: str, known: Mapping[str, Setting], source: str | None) -> str:
    if name not in known:
        raise ConfigError(f"unknown setting {name} in {source}{hint(name, known)}")
    return name


def _known_variable(variable: str, known: Mapping[str, Setting]) -> str:
    name = variable.removeprefix(ENV_PREFIX).lower()
    if name not in known:
        advice = hint(name, known, lambda setting: known[setting].variable)
        raise ConfigError(f"unknown variable {variable}{advice}")
    return name


def hint(name: str, known: Iterable[str], spell: Callable[[str], str] = str) -> str:
    """Return what takes the place of another server's flag, or asks for the name most like it.

    `spell` writes that name as the user would.
    """
    by_word = {option.strip("-"): option for option in known}
    word = name.strip("-")
    if (instead := INSTEAD.get(word.replace("_", "-"))) is not None:
        return f": {instead}"
    close = difflib.get_close_matches(word, by_word, n=1, cutoff=_LIKENESS)
    close += [option for option in by_word if word and option.startswith(word)]
    return f"; did you mean {spell(by_word[close[0]])}?" if close else ""


def _convert(value: Any, setting: Setting, origin: str) -> Any:
    """Text of flags and variables becomes the field's type; bounds are checked for every source."""
    if value is None or (isinstance(value, str) and value.lower() == "none"):
        if type(None) in _union_members(setting.type):
            return None
        if setting.is_list:
            return ()
        is_of_text = str in (_base_type(setting.type), *_union_members(setting.type))
        hint_of_yaml = "; the word null needs quotes" if value is None and is_of_text else ""
        raise ConfigError(f"{origin} must have a value{hint_of_yaml}")
    is_text = isinstance(value, str)
    if is_text and setting.is_bool:
        value = {"1": True, "true": True, "0": False, "false": False}.get(value.lower(), value)
    elif is_text and typing.get_origin(_base_type(setting.type)) is dict:
        value = _parse_pairs(value, origin)
    elif is_text and _base_type(setting.type) is int:
        value = _parse_size(value)
    elif setting.is_list:
        value = _parse_list(value, setting)
    try:
        return msgspec.convert(value, setting.type, strict=not is_text)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{origin}: {_error_text(value, setting, str(error))}") from (
            None if setting.is_secret else error
        )


def _error_text(value: Any, setting: Setting, error: str) -> str:
    """Return what is wrong with a value, in the terms of the setting."""
    if setting.is_secret:
        return "a key has 1 to 256 characters; at most 16 keys"
    shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else value
    if setting.choices:
        note = f"; {OTHER_VALUES[setting.name]}" if setting.name in OTHER_VALUES else ""
        return f"{shown!r} is not one of {', '.join(setting.choices)}{note}"
    if "regex" in error:
        for description in _bounds(setting.type, "description"):
            return f"{shown!r} is not {description}"
    if isinstance(value, str) and ", got `str`" in error:
        kind = "a whole number" if _base_type(setting.type) is int else "a number"
        if setting.is_bool:
            kind = "true, false, 1 or 0"
        return f"{shown!r} is not {kind}"
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


def _union_members(hint: Any) -> tuple[Any, ...]:
    bare = _without_metadata(hint)
    if typing.get_origin(bare) in (typing.Union, types.UnionType):
        return tuple(_without_metadata(member) for member in typing.get_args(bare))
    return (bare,)


def _without_metadata(hint: Any) -> Any:
    return typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint


def _base_type(hint: Any) -> Any:
    return next(member for member in _union_members(hint) if member is not type(None))


def _bounds(hint: Any, name: str) -> Iterator[Any]:
    """Yield the values of one bound in a type, the members of its union and the items of a list."""
    for meta in getattr(hint, "__metadata__", ()):
        if getattr(meta, name, None) is not None:
            yield getattr(meta, name)
    bare = _without_metadata(hint)
    if typing.get_origin(bare) in (typing.Union, types.UnionType, tuple):
        for member in typing.get_args(bare):
            yield from _bounds(member, name)
