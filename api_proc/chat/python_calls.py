"""Calls as a list of Python calls, `[f(a=1), g(b="x")]`; a call is read when it is complete."""

import json
import re
from dataclasses import dataclass
from typing import Any

from api_proc.chat.call_syntax import CallContext, Schema
from api_proc.chat.lark import LarkWriter, subschema
from api_proc.chat.literals import parse_arguments
from api_proc.chat.reader import Reading, TextReader

_BRACKETS = re.compile(r"[\"'()\[\]{}]")
_QUOTES = {quote: re.compile(rf"[\\{quote}]") for quote in "\"'"}


@dataclass(frozen=True)
class PythonCalls:
    """`name(key=value, ...)`."""

    @property
    def inner_markers(self) -> tuple[str, ...]:
        return ()

    def read(self, context: CallContext, marker: str) -> Reading[None]:
        reader, sink = context.reader, context.sink
        reader.start_record(marker)
        if (yield from reader.skip()) == "[":
            reader.take(1)
            while (yield from reader.skip(" \t\r\n,")) not in ("]", ""):
                call = yield from self._call(context)
                if call is None:
                    break
                name, arguments = call
                reader.drop_record()
                sink.start_call(name)
                sink.arguments(json.dumps(arguments, ensure_ascii=False))
                sink.end_call()
                reader.start_record("")
            else:
                if (yield from reader.skip("")) == "]":
                    reader.take(1)
                    reader.drop_record()
        sink.content(reader.take_record())

    def _call(self, context: CallContext) -> Reading[tuple[str, dict[str, Any]] | None]:
        name = yield from context.reader.name()
        if (yield from context.reader.skip("")) != "(":
            return None
        if not name or (context.is_bare and name not in context.schemas):
            return None
        context.reader.take(1)
        inner: list[str] = []
        if not (yield from _until_closed(context.reader, inner)):
            return None
        properties = context.schemas.get(name, {}).get("properties") or {}
        try:
            return name, parse_arguments("".join(inner), list(properties))
        except ValueError:
            return None

    def body(self, name: str, schema: Schema, lark: LarkWriter, *, is_strict: bool) -> str:
        properties = schema.get("properties") or {}
        required = schema.get("required") or []

        def argument(key: str) -> str:
            value = lark.json(subschema(schema, properties[key]), is_strict=is_strict)
            return lark.rule(f"{lark.text(key + '=')} {value}")

        first = [argument(key) for key in properties if key in required]
        optional = [argument(key) for key in properties if key not in required]
        tail = ""
        starts = [""]
        for element in reversed(optional):
            starts.append(f"{element} {tail}")
            tail = lark.rule(f'(", " {element})? {tail}')
        inner = ' ", " '.join(first) + f" {tail}" if first else lark.choice(starts)
        return f"{lark.text(name + '(')} {inner} {lark.text(')')}"


def _until_closed(reader: TextReader, pieces: list[str]) -> Reading[bool]:
    """Consume the text up to the parenthesis that closes a call; False if there is not one."""
    depth, quote = 1, ""
    while True:
        text = "".join((yield from _piece(reader)))
        if not text:
            return False
        position = 0
        while True:
            found = (_QUOTES[quote] if quote else _BRACKETS).search(text, position)
            if found is None:
                break
            character, position = found[0], found.end()
            if character == "\\":
                if position == len(text):  # the escaped character has not arrived
                    if not (yield from reader.skip("")):
                        return False
                    text += reader.take(1)
                position += 1
            elif quote:
                quote = ""
            elif character in _QUOTES:
                quote = character
            else:
                depth += 1 if character in "([{" else -1
                if depth == 0:
                    pieces.append(text[: position - 1])
                    reader.give_back(text[position:])
                    return True
        pieces.append(text)


def _piece(reader: TextReader) -> Reading[str]:
    """Consume all text that has arrived; "" at the end."""
    yield from reader.skip("")
    return reader.take_all()
