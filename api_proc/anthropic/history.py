"""The messages of a request become the messages of a chat.

A block becomes a piece of a turn: text its content, `tool_use` a call, thinking its reasoning. Each
`tool_result` is a separate turn, and neighbours of one role are joined.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from api_proc.anthropic.blocks import (
    DocumentBlock,
    ImageBlock,
    InputBlock,
    RedactedThinkingBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from api_proc.anthropic.bodies import InputMessage
from api_proc.errors import ApiError, invalid, unsupported
from api_proc.generation.messages import CalledFunction, ChatMessage, MessageToolCall

_BILLING_NOTE = "x-anthropic-billing-header:"
"""Claude Code begins the system prompt with such a block for Anthropic's own billing. It differs
in every request, so that no prefix would be found in the cache."""


@dataclass
class _Turn:
    """One message of the chat while it is put together."""

    role: str
    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[MessageToolCall] = field(default_factory=list)
    tool_call_id: str | None = None
    name: str | None = None

    def message(self) -> ChatMessage:
        return ChatMessage(
            role=self.role,
            content="\n".join(self.texts),
            name=self.name,
            tool_call_id=self.tool_call_id,
            reasoning_content="\n".join(self.reasoning) or None,
            tool_calls=self.calls or None,
        )


class _History:
    def __init__(self) -> None:
        self.turns: list[_Turn] = []
        self._tool_names: dict[str, str] = {}

    def turn(self, role: str) -> _Turn:
        """Return the last turn if it has this role, else a new one."""
        if not self.turns or self.turns[-1].role != role:
            self.turns.append(_Turn(role))
        return self.turns[-1]

    def add(self, role: str, block: InputBlock, where: str) -> None:
        """Add one block of a message, whose place in the body is `where`."""
        if isinstance(block, TextBlock):
            if block.text:
                self.turn(role).texts.append(block.text)
        elif isinstance(block, ToolResultBlock):
            _require_role(role, "user", "tool_result", where)
            name = self._tool_names.get(block.tool_use_id)
            text = _result_text(block, where)
            self.turns.append(_Turn("tool", [text], tool_call_id=block.tool_use_id, name=name))
        elif isinstance(block, ToolUseBlock):
            _require_role(role, "assistant", "tool_use", where)
            self._tool_names[block.id] = block.name
            call = MessageToolCall(CalledFunction(block.name, block.input), block.id)
            self.turn(role).calls.append(call)
        elif isinstance(block, ThinkingBlock | RedactedThinkingBlock):
            _require_role(role, "assistant", "thinking", where)
            if isinstance(block, ThinkingBlock) and block.thinking:
                self.turn(role).reasoning.append(block.thinking)
        else:
            raise _not_text(block, where)


def chat_messages(
    system: str | list[TextBlock] | None, messages: Iterable[InputMessage]
) -> list[ChatMessage]:
    """Return the messages of the chat. What a chat cannot contain is a 400."""
    history = _History()
    texts = [system] if isinstance(system, str) else [block.text for block in system or []]
    texts = [text for text in texts if text and not text.startswith(_BILLING_NOTE)]
    if texts:
        history.turn("system").texts += texts
    for i, message in enumerate(messages):
        content = message.content
        blocks: list[InputBlock] = []
        blocks += [TextBlock(content)] if isinstance(content, str) else content
        if message.role != "assistant" and all(map(_is_empty, blocks)):
            raise invalid(f"messages[{i}].content", "must not be empty")
        for j, block in enumerate(blocks):
            history.add(message.role, block, f"messages[{i}].content[{j}]")
    return [turn.message() for turn in history.turns]


def _is_empty(block: InputBlock) -> bool:
    return isinstance(block, TextBlock) and not block.text


def _result_text(block: ToolResultBlock, where: str) -> str:
    content = block.content or ""
    if not isinstance(content, str):
        for k, part in enumerate(content):
            if not isinstance(part, TextBlock):
                raise _not_text(part, f"{where}.content[{k}]")
        content = "\n".join(part.text for part in content if isinstance(part, TextBlock))
    return f"Error: {content}" if block.is_error else content


def _require_role(role: str, required: str, kind: str, where: str) -> None:
    if role != required:
        raise invalid(f"{where}.type", f"{kind!r} is allowed only in messages of the {required}")


def _not_text(block: ImageBlock | DocumentBlock, where: str) -> ApiError:
    kind = "image" if isinstance(block, ImageBlock) else "document"
    return unsupported(f"{where}.type", f"{kind!r} is not supported, only text is")


def instructions_as_user(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Return messages in which the role system occurs only at the beginning.

    Later instructions become text of the user, joined with the user's own.
    """
    turns: list[tuple[ChatMessage, list[str]]] = []
    for message in messages:
        assert isinstance(message.content, str)
        role = "user" if turns and message.role == "system" else message.role
        if turns and turns[-1][0].role == role == "user":
            turns[-1][1].append(message.content)
        else:
            turns.append((msgspec.structs.replace(message, role=role), [message.content]))
    for message, texts in turns:
        message.content = "\n".join(texts)
    return [message for message, _ in turns]
