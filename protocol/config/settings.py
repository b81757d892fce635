"""Reads an EngineConfig from flags, environment, YAML file and defaults, in this precedence."""

import argparse
import contextlib
import ctypes
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec

from protocol.config import ConfigError, EngineConfig, validate
from protocol.config.foreign_flags import INSTEAD
from protocol.config.gpu_defaults import GPU_NODES, computes_on_gpu, gpu_defaults
from protocol.config.setting_fields import (
    ENV_PREFIX,
    Setting,
    all_settings,
    default_text,
    descriptions,
    flag_of,
)
from protocol.config.setting_values import converted

_LIKENESS = 0.75
"""Least similarity, from 0 to 1, between a wrong name and the one that is suggested."""
_FLAG = re.compile(r"-(?!\d)")
"""The beginning of a flag, and not that of a negative number."""
_TAKES_NO_VALUE = re.compile(r"argument ([^\s/]+)\S*: ignored explicit argument .*")
_NEEDS_VALUE = re.compile(r"argument (\S+): expected (one|at least one) argument")
_KEY = re.compile(rb"""^(["']?)([\w-]+)\1[ \t]*:(?=\s|$)""", re.MULTILINE)
"""A top-level key of a YAML mapping."""


class _Given(NamedTuple):
    """A setting that the user gives."""

    value: Any
    written: str
    """The name under which it was given: a flag, a variable or a key of a file."""
    file: str | None = None

    @property
    def origin(self) -> str:
        return self.written if self.file is None else f"{self.written} in {self.file}"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per setting, grouped by section, and `--config`."""
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings by name")
    groups = {
        item.name: parser.add_argument_group(item.name, (item.type.__doc__ or "").split("\n")[0])
        for item in msgspec.structs.fields(EngineConfig)
    }
    texts = descriptions()
    for setting in all_settings():
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
    """Return the given settings by name; of several sources the last one takes precedence."""
    known = {setting.name: setting for setting in all_settings()}
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
    known = {setting.name: setting for setting in all_settings()}
    tree: dict[str, dict[str, Any]] = {}
    for name, one in given.items():
        tree.setdefault(known[name].section, {})[name] = converted(
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
    """Return a function that writes names of settings as the user has, given a command line."""
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
        for setting in all_settings():
            if setting.is_secret:
                _erase_variable(setting.variable)


def _flags_in(arguments: argparse.Namespace) -> dict[str, Any]:
    names = {setting.name for setting in all_settings()}
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

    The flag may be negated (--no-NAME), or name a part of its value (--NAME.PART). `spell` writes
    the most similar name as the user would.
    """
    by_word = {option.strip("-"): option for option in known}
    word = name.strip("-")
    flag = word.partition(".")[0].replace("_", "-")
    if (instead := INSTEAD.get(flag) or INSTEAD.get(flag.removeprefix("no-"))) is not None:
        return f": {instead}"
    close = difflib.get_close_matches(word, by_word, n=1, cutoff=_LIKENESS)
    close += [option for option in by_word if word and option.startswith(word)]
    return f"; did you mean {spell(by_word[close[0]])}?" if close else ""
