"""What a field may hold, one of a few values or a text of a form, for errors about other values."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import inspect

_type_info = cache(inspect.type_info)
_WRONG = re.compile(r"Invalid (?:enum )?value (?P<value>.*)")
_OTHER_FORM = "Expected `str` matching regex "
_INDEX = re.compile(r"\[[^]]*\]")


def choices(reason: str, kind: Any, path: str) -> str | None:
    """Return what the field may have, for an error; None: it may have any value of a type.

    Args:
        reason: msgspec's error about a value.
        kind: what was decoded; None: not known.
        path: of the field, as `tools[0].type`.
    """
    wrong = _WRONG.fullmatch(reason)
    if kind is None or not (wrong or reason.startswith(_OTHER_FORM)):
        return None
    names = filter(None, _INDEX.sub("", path).split("."))
    found = [_type_info(kind)]
    for name in names:
        found = [inner for outer in _flat(found) for inner in _fields(outer, name)]
    if wrong is None:
        form = next((text for each in found for text in _descriptions(each)), None)
        return f"must be {form}" if form else None
    possible = list(dict.fromkeys(value for each in _flat(found) for value in _values(each)))
    if not possible:
        return None
    return f"{wrong['value']} is not one of {', '.join(map(str, possible))}"


def _flat(kinds: list[inspect.Type]) -> Iterator[inspect.Type]:
    """Yield the types in unions and collections."""
    for kind in kinds:
        match kind:
            case inspect.UnionType(types=types):
                yield from _flat(list(types))
            case inspect.CollectionType(item_type=inner) | inspect.DictType(value_type=inner):
                yield from _flat([inner])
            case inspect.Metadata(type=inner):
                yield from _flat([inner])
            case _:
                yield kind


def _fields(kind: inspect.Type, name: str) -> Iterator[inspect.Type]:
    if isinstance(kind, inspect.StructType):
        yield from (field.type for field in kind.fields if field.encode_name == name)
        if kind.tag_field == name:
            yield inspect.LiteralType((kind.tag,))


def _descriptions(kind: inspect.Type) -> Iterator[str]:
    match kind:
        case inspect.UnionType(types=types):
            for member in types:
                yield from _descriptions(member)
        case inspect.CollectionType(item_type=inner):
            yield from _descriptions(inner)
        case inspect.Metadata(extra_json_schema={"description": str(text)}):
            yield text


def _values(kind: inspect.Type) -> Iterator[object]:
    match kind:
        case inspect.EnumType(cls=cls):
            yield from (member.value for member in cls)
        case inspect.LiteralType(values=values):
            yield from values
