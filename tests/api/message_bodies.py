"""Bodies of /v1/messages."""

from typing import Any

from tests.api.tool_answers import PARAMETERS

PATH = "/v1/messages"
COUNT = PATH + "/count_tokens"
USER: Any = {"role": "user", "content": "hi"}
TOOLS: Any = [
    {"name": "get_weather", "description": "The weather.", "input_schema": PARAMETERS},
    {"name": "now", "type": "custom", "input_schema": {"type": "object", "properties": {}}},
]


def body_of(**fields: Any) -> dict[str, Any]:
    return {"model": "null", "max_tokens": 5000, "messages": [USER]} | fields
