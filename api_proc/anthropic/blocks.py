"""Content blocks: what the messages of a request and of an answer consist of."""

from typing import Any

import msgspec


class TextBlock(msgspec.Struct, tag_field="type", tag="text", omit_defaults=True):
    text: str
    cache_control: dict[str, Any] | None = None


class ThinkingBlock(msgspec.Struct, tag_field="type", tag="thinking"):
    """Reasoning. The signature is not verified; clients return only what has one."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(msgspec.Struct, tag_field="type", tag="redacted_thinking"):
    """Reasoning of another server, which only that server can read."""

    data: str


class ToolUseBlock(msgspec.Struct, tag_field="type", tag="tool_use", omit_defaults=True):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]
    cache_control: dict[str, Any] | None = None


class ImageBlock(msgspec.Struct, tag_field="type", tag="image"):
    """Not supported; known so that it is refused by name."""


class DocumentBlock(msgspec.Struct, tag_field="type", tag="document"):
    """Not supported; known so that it is refused by name."""


class ToolResultBlock(msgspec.Struct, tag_field="type", tag="tool_result"):
    """What a call has returned."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None
    cache_control: dict[str, Any] | None = None


InputBlock = (
    TextBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ToolUseBlock
    | ToolResultBlock
    | ImageBlock
    | DocumentBlock
)
OutputBlock = TextBlock | ThinkingBlock | ToolUseBlock
