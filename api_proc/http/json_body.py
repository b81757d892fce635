"""Decodes JSON bodies strictly: without duplicate names, NaN or lone surrogates."""

import json
import re
from typing import Any, Generic, TypeVar

import msgspec

from api_proc.errors import ApiError, from_decoding

_NAMES = re.compile(rb'"(\w{1,64})"\s*:')

Body = TypeVar("Body", bound=msgspec.Struct)


class BodyDecoder(Generic[Body]):
    """Decodes the bodies of one route."""

    def __init__(self, kind: type[Body]) -> None:
        self._decoder = msgspec.json.Decoder(kind)

    def __call__(self, raw: bytes) -> Body:
        """Decode and validate one body; raises a 400 that names the field, if one is wrong."""
        try:
            body = self._decoder.decode(raw)
            _reject_duplicate_names(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise from_decoding(error) from error
        return body


def _reject_duplicate_names(raw: bytes) -> None:
    """Reject duplicate names, because JSON parsers differ in which of the two values they use.

    The second parse is rare: names occur twice in a list of messages, hardly beside a long prompt.
    """
    names = _NAMES.findall(raw)
    if len(names) != len(set(names)):
        json.loads(raw, object_pairs_hook=_unique_names, parse_int=str, parse_float=str)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for name, value in pairs:
        if name in names:
            message = f"{name}: the name occurs twice"
            raise ApiError(400, message, param=name, code="duplicate_name")
        names[name] = value
    return names
