"""Turns the text of one output sequence into events, as it arrives.

The events so far are a function of the text so far: a parser that gets the same text in other
pieces, as after a restart of the API, has passed on the same.
"""

from collections.abc import Callable, Mapping
from typing import Any

from api_proc.chat.call_syntax import CallContext
from api_proc.chat.events import Event, EventSink
from api_proc.chat.formats import Dialect
from api_proc.chat.reader import Reading, TextReader
from api_proc.chat.reasoning_counter import ReasoningCounter


class OutputParser:
    """Passes on an output's reasoning, content and tool calls, in the syntax of its model."""

    def __init__(
        self,
        dialect: Dialect,
        *,
        schemas: Mapping[str, dict[str, Any]] | None,
        is_reasoning_open: bool,
        make_id: Callable[[int], str],
        keeps_reasoning: bool = True,
    ) -> None:
        """`schemas` are the parameters of the tools by name; None: calls stay text.

        `is_reasoning_open`: the prompt ends inside of reasoning.
        """
        self._dialect = dialect
        self._has_tools = schemas is not None
        self._is_reasoning_open = is_reasoning_open
        self._reader = TextReader()
        self._sink = EventSink(make_id, keeps_reasoning=keeps_reasoning)
        self._context = CallContext(self._reader, self._sink, schemas or {}, is_bare=False)
        self._reading = self._read()

    @property
    def num_calls(self) -> int:
        """Tool calls that have begun."""
        return self._sink.num_calls

    def reasoning_counter(self, token_bytes: Callable[[int], bytes]) -> ReasoningCounter | None:
        """Return a counter of the output's tokens of reasoning, if the model may reason."""
        form = self._dialect.reasoning_markers
        if form is None:
            return None
        return ReasoningCounter(
            token_bytes,
            form.begin,
            (form.end, *self._call_markers),
            is_open=self._is_reasoning_open,
            repeats=self._dialect.messages is not None,
        )

    @property
    def _call_markers(self) -> tuple[str, ...]:
        """Markers of calls that end reasoning."""
        return self._dialect.call_markers if self._has_tools else ()

    def push(self, text: str, *, is_last: bool = False) -> list[Event]:
        """Add the next piece of text; return the events that are certain now."""
        self._reader.push(text)
        if is_last:
            self._reader.end()
        next(self._reading, None)
        if is_last:
            self._sink.finish()
        return self._sink.take()

    def _read(self) -> Reading[None]:
        messages = self._dialect.messages
        if messages is not None:
            yield from messages.read(self._context, has_tools=self._has_tools)
            return
        marker = ""
        if self._dialect.reasoning is not None:
            marker = yield from self._read_reasoning()
        yield from self._read_content(marker)

    def _read_reasoning(self) -> Reading[str]:
        """Read reasoning, if the output begins with it; return the marker of a call after it."""
        form, call_markers = self._dialect.reasoning, self._call_markers
        assert form is not None
        # The model may repeat the marker that the prompt ends with.
        if not (yield from self._reader.starts_with(form.begin)) and not self._is_reasoning_open:
            return ""
        found = yield from self._reader.until((form.end, *call_markers), self._sink.reasoning)
        self._sink.boundary()
        return found if found in call_markers else ""

    def _read_content(self, marker: str) -> Reading[None]:
        tools = self._dialect.tools
        if tools is None or not self._has_tools:
            yield from self._reader.until((), self._sink.content)
            return
        start = tools.bare_start
        if start and not marker and (yield from self._reader.starts_with(start)):
            self._reader.give_back(start)
            yield from tools.syntax.read(self._context._replace(is_bare=True), "")
        while True:
            if marker in tools.markers:
                yield from tools.syntax.read(self._context, marker)
            elif marker in tools.opens or self.num_calls:
                self._sink.boundary()
            elif marker:
                self._sink.content(marker)
            marker = yield from self._reader.until(tools.all_markers, self._sink.content)
            if not marker:
                return
