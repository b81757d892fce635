"""What a chat's output consists of: reasoning, content and tool calls, as events in their order.

Routes translate events into the chunks of their API; nothing here knows those.
"""

from collections.abc import Callable

import msgspec


class ReasoningDelta(msgspec.Struct, frozen=True, gc=False):
    text: str


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    text: str


class ToolCallStart(msgspec.Struct, frozen=True, gc=False):
    index: int
    id: str
    name: str


class ArgumentsDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of the JSON text of a call's arguments."""

    index: int
    text: str


class ToolCallEnd(msgspec.Struct, frozen=True, gc=False):
    """The call has ended; its arguments may be incomplete where the output was cut."""

    index: int


Event = ReasoningDelta | ContentDelta | ToolCallStart | ArgumentsDelta | ToolCallEnd


class EventSink:
    """Collects the events of one sequence.

    White space next to reasoning and calls is dropped; white space at the end of a text is held
    back until more text follows it.
    """

    def __init__(self, make_id: Callable[[int], str], *, keeps_reasoning: bool) -> None:
        """`make_id` returns the id of the n-th call, for models that do not write ids."""
        self._keeps_reasoning = keeps_reasoning
        self.num_calls = 0
        self._make_id = make_id
        self._events: list[Event] = []
        self._content = _Trimmed(trims_start=False)
        self._reasoning = _Trimmed(trims_start=True)
        self._is_call_open = False

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def reasoning(self, text: str) -> None:
        if self._keeps_reasoning and (text := self._reasoning.push(text)):
            self._events.append(ReasoningDelta(text))

    def content(self, text: str) -> None:
        if text := self._content.push(text):
            self._events.append(ContentDelta(text))

    def boundary(self) -> None:
        """Separate the texts before and after a block of reasoning or calls."""
        self._reasoning = _Trimmed(trims_start=True)
        self._content = _Trimmed(trims_start=True)

    def start_call(self, name: str, call_id: str | None = None) -> None:
        self.end_call()
        self.boundary()
        index = self.num_calls
        self.num_calls += 1
        self._is_call_open = True
        self._events.append(ToolCallStart(index, call_id or self._make_id(index), name))

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(ArgumentsDelta(self.num_calls - 1, text))

    def end_call(self) -> None:
        if self._is_call_open:
            self._is_call_open = False
            self._events.append(ToolCallEnd(self.num_calls - 1))

    def finish(self) -> None:
        """The output has ended."""
        self.end_call()
        if text := self._content.flush():
            self._events.append(ContentDelta(text))


class _Trimmed:
    """A text that arrives in pieces, without the white space at its end and perhaps its start."""

    def __init__(self, *, trims_start: bool) -> None:
        self._trims_start = trims_start
        self._space = ""

    def push(self, text: str) -> str:
        """Return the text that is certain to be shown."""
        if self._trims_start:
            text = text.lstrip()
            if not text:
                return ""
            self._trims_start = False
        shown = text.rstrip()
        if not shown:
            self._space += text
            return ""
        result = self._space + shown
        self._space = text[len(shown) :]
        return result

    def flush(self) -> str:
        """Return the white space at the end of the output."""
        space, self._space = self._space, ""
        return space


def merged(events: list[Event]) -> list[Event]:
    """Join neighbours of one kind: the result does not depend on how a text was cut."""
    result: list[Event] = []
    for event in events:
        last = result[-1] if result else None
        if isinstance(event, ContentDelta) and isinstance(last, ContentDelta):
            result[-1] = ContentDelta(last.text + event.text)
        elif isinstance(event, ReasoningDelta) and isinstance(last, ReasoningDelta):
            result[-1] = ReasoningDelta(last.text + event.text)
        elif isinstance(event, ArgumentsDelta) and isinstance(last, ArgumentsDelta):
            result[-1] = ArgumentsDelta(last.index, last.text + event.text)
        else:
            result.append(event)
    return result
