"""What the process that fetches models reports to its parent: one JSON object per line."""

from pathlib import Path

import msgspec

from protocol.config import ModelConfig
from protocol.message import MAX_TEXT

SHOWN_BYTES = 1_000_000
"""Smaller fetches are neither drawn nor logged, such as that of a configuration."""
SETTINGS = ("model", "speculative_model")
"""Settings that may name a model of the hub."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """One line."""


class Found(Message, frozen=True):
    """The commit that a name stands for."""

    name: str
    commit: str


class Fetching(Message, frozen=True):
    """Bytes of a model's files that are in the cache, of those that it needs."""

    name: str
    done: int
    total: int


class Note(Message, frozen=True):
    """A sentence for the log; the fetch continues."""

    text: str


class Fetched(Message, frozen=True):
    """All models are complete: their directories, by setting."""

    directories: dict[str, str]


class Refused(Message, frozen=True):
    """A model cannot be fetched, or cannot run: a sentence that names it."""

    text: str
    is_absent: bool = False
    """Whether the name may be a directory's with a mistake in it: no such model was found."""


Line = Found | Fetching | Note | Fetched | Refused
_decoder = msgspec.json.Decoder(Line)


def encode(message: Line) -> bytes:
    """Return a line with its end."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> Line:
    message: Line = _decoder.decode(line)
    return message


def one_line(text: str) -> str:
    """Return a text that may be a hub's without what a terminal would execute."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


class Refusal(Exception):
    """A model cannot be fetched, or cannot run; the text is a sentence that names it."""

    def __init__(self, text: str, *, is_absent: bool = False) -> None:
        super().__init__(text)
        self.is_absent = is_absent

    def message(self) -> Refused:
        """Return what the parent receives."""
        return Refused(one_line(str(self))[:MAX_TEXT], self.is_absent)


def hub_names(model: ModelConfig) -> dict[str, str]:
    """The settings that still name a model of the hub: local ones are absolute paths."""
    given = {setting: getattr(model, setting) for setting in SETTINGS}
    return {
        setting: name
        for setting, name in given.items()
        if name not in (None, "null") and not Path(name).is_absolute()
    }


def gguf_files(model: ModelConfig) -> dict[str, str]:
    """The settings that name a GGUF file, which becomes a directory."""
    given = {setting: getattr(model, setting) for setting in SETTINGS}
    return {
        setting: name
        for setting, name in given.items()
        if name is not None
        and Path(name).is_absolute()
        and is_gguf(name)
        and not Path(name).is_dir()
    }


def is_gguf(name: str | Path) -> bool:
    """Return whether a name is that of a GGUF file."""
    return str(name).lower().endswith(".gguf")
