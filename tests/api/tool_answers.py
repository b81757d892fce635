"""An answer with reasoning and tool calls, and the text of a request's prompt."""

from api_proc.text.tokenizer import FIRST_BYTE_ID
from protocol.api_core import AddRequest
from protocol.model_facts import ModelFacts
from tests.api.fake_engine import EOS_ID

FACTS = ModelFacts("null", 1000, 1_000_000, 16, 70_000, [EOS_ID])
TEXT = (
    '<think>\nWhich "city"?\n</think>\n\nLet me look.\n<tool_call>\n'
    '{"name": "get_weather", "arguments": {"city": "Genève", "days": [1, 2]}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
ARGUMENTS = '{"city": "Genève", "days": [1, 2]}'
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["city"],
    "additionalProperties": False,
}


def prompt_of(add: AddRequest) -> str:
    return bytes(i - FIRST_BYTE_ID for i in add.prompt_token_ids).decode()
