"""Calls as XML-like elements, one for each parameter; values are typed by the tool's schema."""

import json
import re
from dataclasses import dataclass
from typing import Any

import msgspec

from api_proc.chat.call_syntax import CallContext, Schema
from api_proc.chat.lark import LarkWriter, subschema
from api_proc.chat.literals import parse_literal
from api_proc.chat.reader import Reading

_LITERALS = {"True": True, "False": False, "None": None}


@dataclass(frozen=True)
class XmlCalls:
    """`<begin>name<name_end> <key_begin>key<key_end> <value_begin>value<value_end> ... <end>`."""

    name_end: str
    """Parsers accept its absence before a key."""
    key_begin: str
    key_end: str
    value_begin: str
    value_end: str
    end: str
    separator: str
    """Between a value's end and the next key."""

    @property
    def inner_markers(self) -> tuple[str, ...]:
        return (self.key_begin, self.key_end, self.value_begin, self.value_end, self.end)

    def read(self, context: CallContext, marker: str) -> Reading[None]:
        reader, sink = context.reader, context.sink
        reader.start_record(marker)
        held: list[str] = []
        name_end = self.name_end.strip() or self.name_end
        name_ends = (name_end, self.key_begin, self.end)
        yield from reader.skip()
        found = yield from reader.until(name_ends, held.append)
        name = "".join(held).strip()
        if not found or not name:
            sink.content(reader.take_record())
            return
        reader.drop_record()
        sink.start_call(name)
        schema = context.schemas.get(name, {})
        is_first = True
        keys = name_ends[1:]
        if found == name_end:
            found = yield from reader.until(keys, _ignore)
        while found == self.key_begin:
            key: list[str] = []
            if not (yield from reader.until((self.key_end,), key.append)):
                return
            if not (yield from self._value("".join(key).strip(), schema, context, is_first)):
                return
            is_first = False
            found = yield from reader.until(keys, _ignore)
        if found:
            sink.arguments("{}" if is_first else "}")
            sink.end_call()

    def _value(
        self, key: str, schema: Schema, context: CallContext, is_first: bool
    ) -> Reading[bool]:
        """Read one value and pass it on as JSON; False if the text ends before it."""
        reader, sink = context.reader, context.sink
        sink.arguments(("{" if is_first else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        yield from self._skip_to_value(context)
        ends = (self.value_end, self.value_end.lstrip())
        types = _types(schema, key)
        if types == {"string"}:
            sink.arguments('"')
            if not (yield from reader.until(ends, lambda text: sink.arguments(_escaped(text)))):
                return False
            sink.arguments('"')
            return True
        held: list[str] = []
        if not (yield from reader.until(ends, held.append)):
            return False
        sink.arguments(_json_of("".join(held), types))
        return True

    def _skip_to_value(self, context: CallContext) -> Reading[None]:
        """Consume the text between a key and its value; a newline stands for no marker."""
        reader = context.reader
        if self.value_begin.strip():
            yield from reader.until((self.value_begin.strip(),), _ignore)
        elif self.value_begin and (yield from reader.skip("")) == self.value_begin:
            reader.take(1)

    def body(self, name: str, schema: Schema, lark: LarkWriter, *, is_strict: bool) -> str:
        properties = schema.get("properties") or {}
        required = schema.get("required") or []
        parts = [lark.text(name + self.name_end)]
        for key, value in properties.items():
            before = lark.text(f"{self.key_begin}{key}{self.key_end}{self.value_begin}")
            inner = self._value_body(subschema(schema, value), lark, is_strict=is_strict)
            element = lark.rule(f"{before} {inner} {lark.text(self.separator)}")
            parts.append(element if key in required else f"{element}?")
        return " ".join([*parts, lark.text(self.end)])

    def _value_body(self, schema: Schema, lark: LarkWriter, *, is_strict: bool) -> str:
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices and all(isinstance(choice, str) for choice in choices):
            return lark.choice(lark.text(choice + self.value_end) for choice in choices)
        if _types({"properties": {"x": schema}}, "x") == {"string"}:
            return lark.until(self.value_end)
        return f"{lark.json(schema, is_strict=is_strict)} {lark.text(self.value_end)}"


def _types(schema: Schema, key: str) -> set[str]:
    """Return the JSON types of a parameter as far as its schema names them."""
    properties = schema.get("properties")
    value = properties.get(key) if isinstance(properties, dict) else None
    if not isinstance(value, dict):
        return set()
    parts = [value]
    for name in ("anyOf", "oneOf"):
        alternatives = value.get(name)
        if isinstance(alternatives, list):
            parts += [part for part in alternatives if isinstance(part, dict)]
    types: set[str] = set()
    for part in parts:
        found = part.get("type")
        types.update([found] if isinstance(found, str) else found or [])
        choices = part.get("enum")
        if found is None and isinstance(choices, list):
            types.update({"string"} if all(isinstance(c, str) for c in choices) else {"any"})
    return types


def _json_of(text: str, types: set[str]) -> str:
    """Return the JSON of a value that is not just a string."""
    stripped = text.strip()
    value: Any
    try:
        value = msgspec.json.decode(stripped)
        json.dumps(value)
    except (msgspec.DecodeError, RecursionError, ValueError):
        value = _literal(stripped, text)
    if "string" in types and not isinstance(value, str) and _type_of(value) not in types:
        value = text
    return json.dumps(value, ensure_ascii=False)


def _literal(stripped: str, text: str) -> Any:
    """Return a value that is written as in Python; any other text stands for itself."""
    if stripped in _LITERALS:
        return _LITERALS[stripped]
    if re.match(r"[\[{(]", stripped):
        try:
            return parse_literal(stripped)
        except ValueError:
            pass
    return text


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    names = {int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
    return names[type(value)]


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _ignore(text: str) -> None:
    pass
