"""Calls as JSON objects with a name and arguments: alone, in a list, or one after another."""

import json
from dataclasses import dataclass

import msgspec

from api_proc.chat.call_syntax import CallContext, Schema
from api_proc.chat.lark import LarkWriter
from api_proc.chat.reader import Reading

_ARGUMENTS_KEYS = ("arguments", "parameters")
_BETWEEN_CALLS = " \t\r\n,;["


@dataclass(frozen=True)
class JsonCalls:
    """`{"name": ..., "arguments": {...}}`."""

    end: str = ""
    arguments_key: str = "arguments"

    @property
    def inner_markers(self) -> tuple[str, ...]:
        return ()

    def read(self, context: CallContext, marker: str) -> Reading[None]:
        reader = context.reader
        reader.start_record(marker)
        num_before = context.sink.num_calls
        while (yield from reader.skip(_BETWEEN_CALLS)) == "{":
            if not (yield from self._object(context)):
                break
        if context.sink.num_calls == num_before:
            context.sink.content(reader.take_record())
            return
        reader.drop_record()
        if (yield from reader.skip()) == "]":
            reader.take(1)

    def _object(self, context: CallContext) -> Reading[bool]:
        """Read one object; False if it is not a call, or not a complete one."""
        reader, sink = context.reader, context.sink
        name: str | None = None
        early: list[str] = []  # these arguments come before the name
        has_arguments = False
        reader.take(1)
        while (character := (yield from reader.skip(" \t\r\n,"))) == '"':
            key = _decoded((yield from reader.json_string()))
            if key is None or (yield from reader.skip()) != ":":
                return False
            reader.take(1)
            if key == "name":
                name = _decoded((yield from reader.json_string()))
                if name is None or (context.is_bare and name not in context.schemas):
                    return False
                reader.drop_record()
                sink.start_call(name)
                sink.arguments("".join(early))
            elif name is None and context.is_bare and key != "type":
                return False  # the JSON is content, which must not wait for its end
            elif key in _ARGUMENTS_KEYS:
                has_arguments = True
                emit = early.append if name is None else sink.arguments
                if (yield from reader.skip()) in ('"', "n"):  # it is JSON in a string, or null
                    held: list[str] = []
                    is_complete = yield from reader.json_value(held.append)
                    emit(_decoded("".join(held)) or "{}")
                else:
                    is_complete = yield from reader.json_value(emit)
                if not is_complete:
                    return False
            elif not (yield from reader.json_value(_ignore)):
                return False
        if character != "}" or name is None:
            return False
        reader.take(1)
        if not has_arguments:
            sink.arguments("{}")
        sink.end_call()
        return True

    def body(self, name: str, schema: Schema, lark: LarkWriter, *, is_strict: bool) -> str:
        before = f'{{"name": {json.dumps(name)}, "{self.arguments_key}": '
        value = lark.json(schema, is_strict=is_strict)
        return f"{lark.text(before)} {value} {lark.text('}' + self.end)}"


def _decoded(text: str | None) -> str | None:
    """Return the string that a JSON text stands for; None if it is not a string."""
    if text is None:
        return None
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, str) else None


def _ignore(text: str) -> None:
    pass
