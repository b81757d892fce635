"""Errors of msgspec in the terms of JSON: a place, and `must be an integer >= 1`."""

import re
from typing import NamedTuple

import msgspec

_PLACE = re.compile(r" - at `(?P<key>key` in `)?\$\.?(?P<path>[^`]*)`$")
_ANY_VALUE = "[...]"
"""The place of a value in a dictionary, as msgspec writes it."""
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_EXPECTED = re.compile(r"Expected `(?P<kinds>[^`]*)`(?P<bound>.*?)(?:, got `(?P<got>[^`]*)`)?")
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
}
_RANGES = {
    "Number out of range": "must be a number from -1.8e308 to 1.8e308",
    "Integer value out of range": "must be an integer of at most 4300 digits",
}
"""Errors of numbers that no field can hold, with their bounds."""
_MAX_SHOWN = 100
"""Characters of a value."""


class FieldError(NamedTuple):
    """What is wrong with a value, or with a part of it."""

    place: str
    """Path of the part, as `messages[0].role`; empty: the whole."""
    reason: str
    """Why the value is wrong, to be written after its place and a colon."""
    original: str
    """The reason in msgspec's words, without the place."""

    @property
    def is_missing(self) -> bool:
        """Whether the part must be there, and is not."""
        return _MISSING.fullmatch(self.original) is not None

    def about(self, name: str) -> str:
        """Return a line about the value, which has this name."""
        separator = "." if name and self.place and not self.place.startswith("[") else ""
        where = f"{name}{separator}{self.place}"
        return f"{where}: {self.reason}" if where else self.reason


def read_field_error(text: str, shown: str | None = None) -> FieldError:
    """Translate the text of a `ValidationError`; `shown` is the wrong value, where it is known."""
    found = _PLACE.search(text)
    what = text if found is None else text[: found.start()]
    path = "" if found is None else found["path"]
    place = path.replace(_ANY_VALUE, "")
    for pattern, reason in ((_MISSING, "the field is missing"), (_UNKNOWN, "is not a known field")):
        if named := pattern.fullmatch(what):
            return FieldError(f"{place}.{named['name']}".lstrip("."), reason, what)
    reason = _reason(what, shown)
    if found is not None and found["key"]:
        reason = f"a name in it {reason}"
    elif path.endswith(_ANY_VALUE):
        reason = f"a value in it {reason}"
    return FieldError(place, reason, what)


def _reason(what: str, shown: str | None) -> str:
    expected = _EXPECTED.fullmatch(what)
    if what in _RANGES:
        return _RANGES[what]
    if expected is None:
        return what[:1].lower() + what[1:]
    kinds = " or ".join(_KINDS.get(kind, kind) for kind in expected["kinds"].split(" | "))
    bound = expected["bound"].replace("matching regex", "that matches").replace("'s a", " is a")
    got = shown[:_MAX_SHOWN] if shown is not None else _KINDS.get(expected["got"], expected["got"])
    return f"must be {kinds}{bound}" + (f", got {got}" if got else "")


def json_error_text(error: Exception, name: str = "") -> str:
    """Return why a JSON text could not be decoded, as a line about the value with this name."""
    if isinstance(error, msgspec.ValidationError):
        return read_field_error(str(error)).about(name)
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
    return f"{name}: is not valid JSON: {reason}" if name else f"is not valid JSON: {reason}"
