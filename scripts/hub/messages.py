"""Messages from the process that fetches models to its parent: one JSON object per line."""

from pathlib import Path

import msgspec

from protocol.config import ModelConfig
from protocol.message import MAX_TEXT

SHOWN_BYTES = 1_000_000
"""Smaller fetches, such as a configuration, are neither drawn nor logged."""
SETTINGS = ("model", "speculative_model")
"""Settings that may name a model of the hub."""


class Message(msgspec.Struct, frozen=True, tag=True):
    """One line."""


class Found(Message, frozen=True):
    """The commit to which a name was resolved."""

    name: str
    commit: str


class Fetching(Message, frozen=True):
    """Progress of a model: the bytes in the cache and the total."""

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
    """True if no such model was found, so that the name may be a mistyped path."""


Line = Found | Fetching | Note | Fetched | Refused
_decoder = msgspec.json.Decoder(Line)


def encode(message: Line) -> bytes:
    """Return a message as one line."""
    return msgspec.json.encode(message) + b"\n"


def decode(line: bytes) -> Line:
    message: Line = _decoder.decode(line)
    return message


def one_line(text: str) -> str:
    """Return a text, possibly from a hub, as one line without control characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


class Refusal(Exception):
    """A model cannot be fetched, or cannot run; the text is a sentence that names it."""

    def __init__(self, text: str, *, is_absent: bool = False) -> None:
        super().__init__(text)
        self.is_absent = is_absent

    def message(self) -> Refused:
        """Return the message for the parent."""
        return Refused(one_line(str(self))[:MAX_TEXT], self.is_absent)


def hub_names(model: ModelConfig) -> dict[str, str]:
    """Return the settings that name a model of the hub; local models are absolute paths."""
    given = {setting: getattr(model, setting) for setting in SETTINGS}
    return {
        setting: name
        for setting, name in given.items()
        if name not in (None, "null") and not Path(name).is_absolute()
    }


def gguf_files(model: ModelConfig) -> dict[str, str]:
    """Return the settings that name a GGUF file."""
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
    """Return True if a name is that of a GGUF file."""
    return str(name).lower().endswith(".gguf")
