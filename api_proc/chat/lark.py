"""Writes grammars in llguidance's dialect of Lark."""

import json
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from protocol.sampling import JSON_WHITESPACE, MAX_GRAMMAR_CHARS

MAX_START_CHARS = 8192
"""Enough for the rules that every grammar has."""
_JSON_OPTIONS = {
    "whitespace_flexible": False,
    # \s would match white space that JSON does not allow.
    "item_separator": r"[ \t\r\n]{0,2},[ \t\r\n]{0,2}",
    "key_separator": r"[ \t\r\n]{0,2}:[ \t\r\n]{0,2}",
}
_DEFINITIONS = ("$defs", "definitions")


class GrammarTooLarge(Exception):
    """A grammar would have more than MAX_GRAMMAR_CHARS characters."""


class LarkWriter:
    """The rules of one grammar."""

    def __init__(self, added_token_id: Callable[[str], int | None]) -> None:
        """`added_token_id` returns the id of a text that is one added token, else None.

        llguidance matches most of these by id only and not as text.
        """
        self._added_token_id = added_token_id
        self._rules: list[str] = []
        self._num_chars = 0

    def rule(self, body: str, options: str = "", name: str | None = None) -> str:
        """Add a rule and return its name, which is drawn unless it is given."""
        name = name or f"r{len(self._rules)}"
        self._rules.append(f"{name}{options}: {body}")
        self._num_chars += len(self._rules[-1]) + 1
        if self._num_chars > MAX_GRAMMAR_CHARS - MAX_START_CHARS:
            raise GrammarTooLarge
        return name

    def text(self, text: str) -> str:
        """Return an expression for exactly this text; added tokens in it count as tokens."""
        parts = []
        rest = text
        while rest:
            start, end, token_id = self._first_added(rest)
            if start:
                parts.append(json.dumps(rest[:start], ensure_ascii=False))
            if token_id is not None:
                parts.append(f"<[{token_id}]>")
            rest = rest[end:]
        return " ".join(parts)

    def until(self, marker: str) -> str:
        """Return a rule for any text up to and including the first `marker`.

        White space before an added token in the marker is left to the text.
        """
        start, _, token_id = self._first_added(marker)
        if token_id is not None:
            return self.rule(f"TEXT {self.text(marker[start:])}")
        return self.rule(f"TEXT {json.dumps(marker, ensure_ascii=False)}", "[lazy]")

    def json(self, schema: dict[str, Any] | bool, *, is_strict: bool) -> str:
        """Return a rule for a JSON value; keywords that cannot be enforced are errors if strict."""
        if isinstance(schema, bool):
            schema = {}
        options = _JSON_OPTIONS | ({} if is_strict else {"lenient": True})
        text = msgspec.json.encode(schema | {"x-guidance": options}).decode()
        return self.rule(f"%json {text}")

    def choice(self, alternatives: Iterable[str]) -> str:
        return self.rule(" | ".join(alternatives))

    def source(self, start: str) -> str:
        """Return the grammar whose output is `start`."""
        lines = ["%llguidance {}", f"start: {start}", r"TEXT: /(.|\n)*/", *self._rules]
        return "\n".join(lines) + "\n"

    def _first_added(self, text: str) -> tuple[int, int, int | None]:
        """Return start, end and id of the first added token in `text`, or its whole length."""
        for start, character in enumerate(text):
            if character not in "<[":
                continue
            close = ">" if character == "<" else "]"
            end = text.find(close, start) + 1
            if end and (token_id := self._added_token_id(text[start:end])) is not None:
                return start, end, token_id
        return len(text), len(text), None


def nested_json(schema: dict[str, Any] | bool) -> str:
    """Return an expression for JSON that follows a schema, with as much whitespace as elsewhere.

    The worker sets that bound only where the schema is the whole grammar.
    """
    if isinstance(schema, bool):
        return f"%json {str(schema).lower()}"
    options = schema.get("x-guidance", {})
    if isinstance(options, dict) and options.get("whitespace_flexible") is not False:
        schema = schema | {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE} | options}
    return f"%json {msgspec.json.encode(schema).decode()}"


def subschema(root: dict[str, Any], schema: Any) -> dict[str, Any]:
    """Return a part of a schema with the definitions of the whole, so that references work."""
    part = schema if isinstance(schema, dict) else {}
    return {name: root[name] for name in _DEFINITIONS if name in root} | part
