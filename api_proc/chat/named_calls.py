"""Calls as a name, a marker and the arguments as a JSON object."""

import re
from dataclasses import dataclass

from api_proc.chat.call_syntax import CallContext, Schema
from api_proc.chat.lark import LarkWriter
from api_proc.chat.reader import Reading


@dataclass(frozen=True)
class NamedCalls:
    """`name_prefix name name_end {...} end`."""

    name_end: str
    end: str
    name_prefix: str = ""
    has_id: bool = False
    """The name is followed by `:` and a number, and all of this is the id of the call."""

    @property
    def inner_markers(self) -> tuple[str, ...]:
        return (self.name_prefix, self.name_end)

    def read(self, context: CallContext, marker: str) -> Reading[None]:
        reader, sink = context.reader, context.sink
        reader.start_record(marker)
        header: list[str] = []
        if not (yield from reader.until((self.name_end,), header.append)):
            sink.content(reader.take_record())
            return
        text = "".join(header).strip()
        call_id = text if self.has_id else None
        name = text.removeprefix(self.name_prefix)
        if self.has_id:
            name = re.sub(r":\d+$", "", name)
        reader.drop_record()
        sink.start_call(name, call_id)
        if (yield from reader.json_value(sink.arguments)):
            sink.end_call()

    def body(self, name: str, schema: Schema, lark: LarkWriter, *, is_strict: bool) -> str:
        number = ' ":" /[0-9]{1,3}/' if self.has_id else ""
        value = lark.json(schema, is_strict=is_strict)
        before = lark.text(self.name_prefix + name)
        return f"{before}{number} {lark.text(self.name_end)} {value} {lark.text(self.end)}"
