"""The format of gpt-oss: the output is a list of messages, each with a header.

`<|channel|>analysis<|message|>...<|end|>` is reasoning, `final` is content, and a message with a
recipient, `to=functions.NAME`, is a call. The last message ends with the output.
"""

import re

from api_proc.chat.call_syntax import CallContext, Schema
from api_proc.chat.lark import LarkWriter
from api_proc.chat.reader import Reading

START, CHANNEL, MESSAGE, END = "<|start|>", "<|channel|>", "<|message|>", "<|end|>"
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
MARKERS = (START, CHANNEL, MESSAGE, END, "<|constrain|>", "<|call|>", "<|return|>")
_BODY_ENDS = (END, "<|call|>", "<|return|>", START)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")


class HarmonyMessages:
    """Reads and constrains such messages."""

    def read(self, context: CallContext, *, has_tools: bool) -> Reading[None]:
        reader, sink = context.reader, context.sink
        while True:
            header: list[str] = []
            if not (yield from reader.until((MESSAGE,), header.append)):
                sink.content("".join(header))
                return
            text = "".join(header)
            recipient, channel = _RECIPIENT.search(text), _CHANNEL.search(text)
            emit = sink.content
            if recipient is not None and has_tools:
                sink.start_call(recipient[1])
                emit = sink.arguments
            elif channel is not None and channel[1] == "analysis":
                emit = sink.reasoning
            found = yield from reader.until(_BODY_ENDS, emit)
            if not found:
                return
            sink.end_call()
            sink.boundary()

    def body(self, name: str, schema: Schema, lark: LarkWriter, *, is_strict: bool) -> str:
        header = f"{CHANNEL}commentary to=functions.{name} <|constrain|>json{MESSAGE}"
        return f"{lark.text(header)} {lark.json(schema, is_strict=is_strict)}"

    def reasoning(self, lark: LarkWriter) -> str:
        """Return the expression for a message of reasoning before another message."""
        text = f"{lark.text(ANALYSIS)} {lark.until(END)}"
        return lark.rule(f"{text} {lark.text(START + 'assistant')}")

    def final(self, lark: LarkWriter) -> str:
        """Return the expression for the header of a message to the user."""
        return lark.text(CHANNEL + "final" + MESSAGE)
