"""How one tool call is written: what a parser reads and a grammar enforces."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from api_proc.chat.events import EventSink
from api_proc.chat.lark import LarkWriter
from api_proc.chat.reader import Reading, TextReader

Schema = dict[str, Any]


class CallContext(NamedTuple):
    """What a syntax needs to read calls."""

    reader: TextReader
    sink: EventSink
    schemas: Mapping[str, Schema]
    """The parameters of the request's tools by name."""
    is_bare: bool
    """No marker precedes the calls, so only the names of tools distinguish them from text."""


class CallSyntax(Protocol):
    """The inner form of calls, whose place `ToolFormat` describes by markers."""

    @property
    def inner_markers(self) -> tuple[str, ...]:
        """The texts that separate the parts of a call."""

    def read(self, context: CallContext, marker: str) -> Reading[None]:
        """Read the calls after a marker; a text that is not a call becomes content."""

    def body(self, name: str, schema: Schema, lark: LarkWriter, *, is_strict: bool) -> str:
        """Return the expression for one call after the text that begins it."""
