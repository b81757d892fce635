"""Finds a name that an object within a body has, and the struct that decodes the object has not."""

import functools
import types
import typing
from typing import Any

import msgspec
from msgspec import UNSET, Raw, UnsetType

from protocol.config.field_errors import read_field_error

_CONTENT = frozenset({"messages", "input", "documents", "system"})
"""Fields that hold texts: clients send them back as other servers have written them."""


class NestedNames:
    """The fields of a body's struct that hold objects with options."""

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        hints = {name: hint for name, hint in _hints(kind).items() if name not in _CONTENT}
        self.fields = frozenset(name for name, hint in hints.items() if _strict(hint) is not Raw)
        fields = [(name, _strict(hints[name]) | UnsetType, UNSET) for name in sorted(self.fields)]
        self._decoder = msgspec.json.Decoder(msgspec.defstruct("Options", fields))

    def first_unknown(self, raw: bytes) -> str | None:
        """Return the path of the first unknown name in a valid body, such as `text.format.x`."""
        try:
            self._decoder.decode(raw)
        except msgspec.ValidationError as error:
            return read_field_error(str(error)).place
        return None


@functools.cache
def _strict_struct(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return a struct that has the same names, allows no others, and leaves values undecoded."""
    fields = [(name, _strict(hint) | UnsetType, UNSET) for name, hint in _hints(kind).items()]
    return msgspec.defstruct(kind.__name__, fields, forbid_unknown_fields=True)


def _hints(kind: type[msgspec.Struct]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind)
    return {field.encode_name: hints[field.name] for field in msgspec.structs.fields(kind)}


def _strict(hint: Any) -> Any:
    """Return the type with strict structs in it; `Raw`: it has no structs."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    members = typing.get_args(hint) if is_union else (hint,)
    strict = [_strict_member(member) for member in members]
    has_structs = any(one is not other for one, other in zip(strict, members, strict=True))
    return functools.reduce(lambda one, other: one | other, strict) if has_structs else Raw


def _strict_member(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _strict_struct(hint)
    if typing.get_origin(hint) is list and (element := _strict(*typing.get_args(hint))) is not Raw:
        return types.GenericAlias(list, (element,))
    return hint
