"""The help of `troika serve`: an overview, one group of flags, one flag, or everything."""

import shutil
import textwrap
from collections.abc import Iterable, Iterator

import msgspec

from protocol.config import ConfigError, EngineConfig
from protocol.config.setting_fields import Setting, all_settings, default_text, descriptions
from protocol.config.settings import hint

_MAX_COLUMNS = 80
_INDENT = 26
COMMON = ("host", "port", "api_key_file", "max_model_len", "max_num_seqs", "device", "log_level")
ARGUMENTS = {
    "--config": "YAML file with settings by name.",
    "--no-api": "Start no HTTP server.",
    "--help": "This text; --help=GROUP, --help=FLAG or --help=all for more.",
    "--version": "Print the version.",
}
"""Flags that are not settings."""


def help_text(program: str, topic: str) -> str:
    """Return the help about a topic: '', 'all', a group, a flag, or a part of flags' names.

    ConfigError: there is no such topic.
    """
    groups = {item.name: (item.type.__doc__ or "") for item in msgspec.structs.fields(EngineConfig)}
    known = list(all_settings())
    name = topic.lower().lstrip("-").replace("-", "_")
    if not name:
        return _overview(program, groups, known)
    if name == "all":
        return "\n\n".join(_group(group, text, known) for group, text in groups.items())
    if name in groups:
        return _group(name, groups[name], known)
    exact = [setting for setting in known if setting.name == name.removeprefix("no_")]
    if exact:
        return _flag(exact[0])
    found = [setting for setting in known if name in setting.name]
    if found:
        return _rows(found)
    names = [*groups, *(setting.name for setting in known)]
    raise ConfigError(f"no group or flag is named {topic}{hint(name, names)}; see --help")


def _overview(program: str, groups: dict[str, str], known: list[Setting]) -> str:
    lines = [
        f"usage: {program} [MODEL] [flags]",
        "",
        "Serve a model over HTTP with OpenAI's API.",
        "",
        *_row(
            "MODEL",
            "Model of the Hugging Face hub (Qwen/Qwen3-0.6B), checkpoint directory in its format, "
            "GGUF file, 'demo' (default), 'demo-chat' or 'null'.",
        ),
        *(line for flag, text in ARGUMENTS.items() for line in _row(flag, text)),
        "",
        "Often used:",
        _rows(setting for name in COMMON for setting in known if setting.name == name),
        "",
        "Groups of flags, shown by --help=GROUP:",
    ]
    for name, text in groups.items():
        number = sum(setting.section == name for setting in known)
        count = f"{number} flags" if number > 1 else "1 flag"
        lines += _row(name, f"{text.splitlines()[0]} ({count})")
    lines += [
        "",
        "A setting comes from a flag, else from a TROIKA_* variable (TROIKA_PORT=8001),",
        "else from the file of --config.",
    ]
    return "\n".join(lines)


def _group(name: str, text: str, known: Iterable[Setting]) -> str:
    rows = _rows(setting for setting in known if setting.section == name)
    return f"{name}: {text.splitlines()[0]}\n\n{rows}"


def _rows(found: Iterable[Setting]) -> str:
    texts = descriptions()
    lines: list[str] = []
    for setting in found:
        flag = setting.flag if setting.is_bool else f"{setting.flag} {setting.metavar}"
        if setting.is_bool and setting.default:
            flag = "--[no-]" + setting.flag.removeprefix("--")
        lines += _row(flag, texts.get(setting.name, "") + default_text(setting))
    return "\n".join(lines)


def _row(head: str, text: str) -> Iterator[str]:
    """Yield the lines of a flag and its description, in two columns where the flag is short."""
    width = min(shutil.get_terminal_size().columns, _MAX_COLUMNS) - 1 - _INDENT
    body = textwrap.wrap(text, max(width, 24), break_long_words=False, break_on_hyphens=False)
    first = f"  {head}"
    if len(first) + 2 > _INDENT or not body:
        yield first
    else:
        yield f"{first:<{_INDENT}}{body.pop(0)}"
    for line in body:
        yield " " * _INDENT + line


def _flag(setting: Setting) -> str:
    """Describe one setting and all values that it accepts."""
    rows = {
        "flag": f"{setting.flag}, --no-{setting.flag[2:]}"
        if setting.is_bool
        else f"{setting.flag} {setting.metavar}",
        "variable": setting.variable,
        "in --config": f"{setting.name}: ...",
        "group": setting.section,
        "bounds": setting.bounds,
        "default": default_text(setting).strip(" ()").removeprefix("default: "),
    }
    text = descriptions().get(setting.name, "")
    shown = [line for head, cell in rows.items() if cell for line in _row(head, cell)]
    return "\n".join([*textwrap.wrap(text, _MAX_COLUMNS - 1), "", *shown])
