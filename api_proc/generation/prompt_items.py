"""The prompts of a field with four forms: a text, a list of token ids, or a list of either."""

from typing import Any

from api_proc.errors import invalid
from api_proc.http.json_scan import MAX_VALUES


def prompt_items(value: str | list[Any], param: str) -> list[Any]:
    """Return the prompts, which are all texts or all lists of ids; a mixture is a 400."""
    items: list[Any] = [value] if isinstance(value, str) else value
    # The scan of the body lets longer lists pass only if they hold token ids and nothing else.
    if len(items) <= MAX_VALUES and len(set(map(type, items))) > 1:
        message = "a list must hold texts only, token ids only, or lists of token ids only"
        raise invalid(param, message)
    return [items] if isinstance(items[0], int) else items
