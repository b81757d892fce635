"""A chat whose scripted answer reasons and calls two tools."""

import json
from typing import Any

TEMPLATE = (
    "{% for tool in tools or [] %}<tool>{{ tool.function.name }}{% endfor %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if false %}<tool_call>{% endif %}{% if add_generation_prompt %}<think>\n{% endif %}"
)
STORY = "".join(f'{n} "green" bottles, ' for n in range(12))
ARGUMENTS = json.dumps({"text": STORY, "days": [1, {"a": None}]})
REASONING = "The user wants a story, so a tool must write it down."
TEXT = (
    f"{REASONING}\n</think>\n\nI call it.\n<tool_call>\n"
    f'{{"name": "write", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
MESSAGES: Any = [{"role": "user", "content": "Write!"}]
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
        },
    }
    for name in ("write", "now")
]
