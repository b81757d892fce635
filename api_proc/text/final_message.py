"""Chat prompts that end within the final message, so that the model continues that message."""

from collections.abc import Callable
from typing import Any

from api_proc.text.chat_template import ChatTemplateError

_MARK = "\ue000the end\ue000"
"""Follows the final message while the chat is rendered; private characters of Unicode."""

Messages = list[dict[str, Any]]


def render_open(messages: Messages, render: Callable[[Messages], str]) -> str:
    """Render a chat and cut it after the content of its final message.

    The place is found by a mark, because the content may occur again in text that the template
    appends. If the template trims messages, the final message is trimmed too.
    """
    content = messages[-1].get("content")
    if not isinstance(content, str):
        raise ChatTemplateError("the final message has no text to continue")
    marked = render([*messages[:-1], {**messages[-1], "content": content + _MARK}])
    before, mark, _ = marked.rpartition(_MARK)
    if not mark:
        raise ChatTemplateError("the chat template does not render the final message")
    if content != content.rstrip() and not render(messages).startswith(before):
        before = before.rstrip()
    return before
