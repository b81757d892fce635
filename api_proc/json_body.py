"""Turns the bytes of a body into its struct, strictly: no name twice, no NaN, no surrogates."""

import json
import re
from typing import Any, Generic, TypeVar

import msgspec

from api_proc.errors import ApiError, from_decoding

_NAMES = re.compile(rb'"(\w{1,64})"\s*:')

Body = TypeVar("Body", bound=msgspec.Struct)


class BodyDecoder(Generic[Body]):
    """Reads one kind of body."""

    def __init__(self, kind: type[Body]) -> None:
        self._decoder = msgspec.json.Decoder(kind)

    def __call__(self, raw: bytes) -> Body:
        """Decode and check one body.

        Raises:
            ApiError: 400; `param` names the field where one is at fault.
        """
        try:
            body = self._decoder.decode(raw)
            _refuse_duplicate_names(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise from_decoding(error) from error
        return body


def _refuse_duplicate_names(raw: bytes) -> None:
    """JSON readers differ in which of two equal names they take, so neither is taken.

    Parsing twice is only needed where a name is seen twice anywhere in the text, which in a list of
    messages it always is, and next to a long prompt almost never.
    """
    names = _NAMES.findall(raw)
    if len(names) != len(set(names)):
        json.loads(raw, object_pairs_hook=_unique_names, parse_int=str, parse_float=str)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = dict(pairs)
    if len(names) != len(pairs):
        seen: set[str] = set()
        name = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ApiError(400, f"{name}: the name occurs twice", param=name, code="duplicate_name")
    return names
