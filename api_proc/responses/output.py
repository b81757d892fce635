"""The output of a response: the events of a chat become items, and the typed events about them."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import msgspec

from api_proc.chat.events import (
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallStart,
    merged,
)
from api_proc.chat.events import Event as ChatEvent
from api_proc.http.connection import encode
from api_proc.openai.encoded_list import EncodedLists
from api_proc.responses.events import (
    CallArgumentsDelta,
    CallArgumentsDone,
    Event,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningTextDelta,
    ReasoningTextDone,
    TextDelta,
    TextDone,
    type_of,
)
from api_proc.responses.objects import (
    NO_LOGPROBS,
    FunctionCall,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
)

_PREFIXES = {"message": "msg", "reasoning": "rs", "call": "fc"}


@dataclass
class _OpenItem:
    """The item that the model is writing."""

    kind: Literal["message", "reasoning", "call"]
    id: str
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    """JSON of each token's log-probabilities."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def delta(self, text: str) -> TextDelta | ReasoningTextDelta | CallArgumentsDelta:
        kind = _DELTAS[self.kind]
        return kind(item_id=self.id, output_index=self.index, delta=text)

    @cached_property
    def frame(self) -> tuple[bytes, bytes, bytes]:
        """The frame of a delta: what is before its number, between that and its text, and after."""
        event = self.delta("")
        head, _, rest = encode(event).partition(b'"sequence_number":0')
        middle, _, tail = rest.partition(b'"delta":""')
        start = b'event: %b\ndata: %b"sequence_number":' % (type_of(type(event)), head)
        return start, middle + b'"delta":', tail + b"\n"


_DELTAS: dict[str, type[TextDelta] | type[ReasoningTextDelta] | type[CallArgumentsDelta]] = {
    "message": TextDelta,
    "reasoning": ReasoningTextDelta,
    "call": CallArgumentsDelta,
}
_CONTINUED = {"message": ContentDelta, "reasoning": ReasoningDelta, "call": ArgumentsDelta}


class ResponseOutput:
    """The items of one response.

    All events but the text of the last delta are a function of the text so far: they do not depend
    on the pieces in which it arrived.
    """

    def __init__(self, name: str, lists: EncodedLists) -> None:
        """`name` is a part of the ids of all items; `lists` keeps the arrays of complete ones."""
        self._name = name
        self._lists = lists
        self._items: list[OutputItem] = []
        self._open: _OpenItem | None = None
        self._logprobs: list[bytes] = []
        """Of tokens whose text is held back."""

    def push(
        self,
        chat_events: list[ChatEvent],
        logprobs: list[bytes],
        *,
        is_cut: bool = False,
    ) -> list[Event]:
        """Add the events of one token or of one step, and return those about the items.

        The logprobs belong to the text of the message; if the events are only reasoning or calls,
        they are dropped. `is_cut`: the output reached the limit of tokens.
        """
        events: list[Event] = []
        self._logprobs += logprobs
        if chat_events and not any(isinstance(event, ContentDelta) for event in chat_events):
            self._logprobs = []
        for event in merged(chat_events):
            if isinstance(event, ReasoningDelta):
                events += self._text("reasoning", event.text)
            elif isinstance(event, ContentDelta):
                events += self._text("message", event.text)
            elif isinstance(event, ToolCallStart):
                events += self._close() + self._begin("call", event.id, event.name)
            elif isinstance(event, ArgumentsDelta):
                item = self._writing("call")
                item.pieces.append(event.text)
                events.append(item.delta(event.text))
            else:
                item = self._writing("call")
                events += self._close(is_cut=is_cut and not _is_json(item.text))
        return events

    def extend(self, event: ChatEvent) -> tuple[bytes, bytes, bytes] | None:
        """Add a piece of text to the item that is being written; None: it is something else.

        Return the frame of the piece without its number and text.
        """
        item = self._open
        if item is None or not isinstance(event, _CONTINUED[item.kind]):
            return None
        item.pieces.append(event.text)
        return item.frame

    def finish(self, *, is_cut: bool) -> list[Event]:
        """End the output; `is_cut`: its last item is incomplete. There is at least one item."""
        events: list[Event] = []
        if not self._items and self._open is None:
            events += self._begin("message")
        return events + self._close(is_cut=is_cut)

    def items(self) -> list[OutputItem]:
        """Return all items so far, the last of them perhaps incomplete.

        A thread may add to them meanwhile.
        """
        item = self._open  # read first: `_close` removes it after it has added its item
        items = list(self._items)
        if item is not None and item.index == len(items):
            items.append(_item(item, "incomplete", _array(list(item.logprobs))))
        return items

    def _text(self, kind: Literal["message", "reasoning"], text: str) -> list[Event]:
        events: list[Event] = []
        if self._open is None or self._open.kind != kind:
            events += self._close() + self._begin(kind)
        item = self._writing(kind)
        item.pieces.append(text)
        delta = item.delta(text)
        if isinstance(delta, TextDelta):
            delta.logprobs = _array(self._logprobs)
            item.logprobs += self._logprobs
            self._logprobs = []
        return [*events, delta]

    def _begin(
        self, kind: Literal["message", "reasoning", "call"], call_id: str = "", name: str = ""
    ) -> list[Event]:
        index = len(self._items)
        item_id = f"{_PREFIXES[kind]}_{self._name}_{index}"
        self._open = item = _OpenItem(kind, item_id, index, call_id, name)
        if kind == "call":
            return [ItemAdded(output_index=index, item=_item(item, "in_progress", NO_LOGPROBS))]
        empty: OutputMessage | ReasoningItem = OutputMessage(item_id, "in_progress", [])
        part: OutputText | ReasoningText = OutputText("")
        if kind == "reasoning":
            empty, part = ReasoningItem(item_id, "in_progress", []), ReasoningText("")
        return [
            ItemAdded(output_index=index, item=empty),
            PartAdded(item_id=item_id, output_index=index, part=part),
        ]

    def _writing(self, kind: str) -> _OpenItem:
        assert self._open is not None
        assert self._open.kind == kind
        return self._open

    def _close(self, *, is_cut: bool = False) -> list[Event]:
        item = self._open
        if item is None:
            return []
        logprobs = self._lists.add(_parts(item.logprobs)) if item.logprobs else NO_LOGPROBS
        whole = _item(item, "incomplete" if is_cut else "completed", logprobs)
        self._items.append(whole)
        self._open = None
        done = ItemDone(output_index=item.index, item=whole)
        item_id, index, text = item.id, item.index, item.text
        if isinstance(whole, FunctionCall):
            last = CallArgumentsDone(
                item_id=item_id, output_index=index, name=item.name, arguments=text
            )
            return [last, done]
        part = PartDone(item_id=item_id, output_index=index, part=whole.content[0])
        if isinstance(whole, ReasoningItem):
            return [ReasoningTextDone(item_id=item_id, output_index=index, text=text), part, done]
        text_done = TextDone(item_id=item_id, output_index=index, text=text, logprobs=logprobs)
        return [text_done, part, done]


def _array(items: list[bytes]) -> msgspec.Raw:
    """Return the JSON of an array with these items."""
    return msgspec.Raw(b"[%b]" % b",".join(items)) if items else NO_LOGPROBS


def _parts(items: list[bytes]) -> list[bytes]:
    """Return the same JSON in parts, without a copy of the items."""
    parts = [b","] * (2 * len(items) + 1)
    parts[1::2] = items
    parts[0], parts[-1] = b"[", b"]"
    return parts


def _item(
    item: _OpenItem, status: str, logprobs: msgspec.Raw
) -> OutputMessage | ReasoningItem | FunctionCall:
    if item.kind == "call":
        return FunctionCall(item.id, status, item.call_id, item.name, item.text)
    if item.kind == "reasoning":
        return ReasoningItem(item.id, status, [ReasoningText(item.text)])
    return OutputMessage(item.id, status, [OutputText(item.text, logprobs=logprobs)])


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
