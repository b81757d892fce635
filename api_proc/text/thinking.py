"""The budget of a prompt's reasoning in the engine's form, with the markers as token ids."""

from api_proc.errors import invalid
from api_proc.text.processor import TextProcessor
from api_proc.text.tokenizer import ByteTokenizer, EncodeOptions
from protocol.sampling import MAX_MARKER_TOKENS, ThinkingBudget

_MARKER = EncodeOptions(add_special_tokens=False, max_tokens=MAX_MARKER_TOKENS)


def thinking_budget(
    text: TextProcessor, prompt_token_ids: list[int], max_tokens: int | None
) -> ThinkingBudget | None:
    """Return the budget of a request; None if it has none, or -1 tokens.

    Raises a 400 if the model has no reasoning format, or if the end of reasoning is not a single
    token: its ids would depend on the text around it.
    """
    if max_tokens is None or max_tokens == -1:
        return None
    param, form = "thinking_token_budget", text.dialect.reasoning_markers
    if form is None:
        message = "the model has no known format of reasoning; --reasoning-parser names one"
        raise invalid(param, message)
    tokenizer = text.tokenizer
    # The byte tokenizer has only one way to write a text.
    if tokenizer.added_token_id(form.end) is None and not isinstance(tokenizer, ByteTokenizer):
        raise invalid(param, f"the end of the model's reasoning, {form.end!r}, is not one token")
    is_open = text.is_reasoning_open(prompt_token_ids)
    begin = [] if is_open else tokenizer.encode(form.begin, _MARKER)
    end = tokenizer.encode(form.end, _MARKER)
    ids = map(tokenizer.added_token_id, text.dialect.call_markers)
    calls = [i for i in ids if i is not None]
    # A parser ignores white space before the marker, so the model may have begun to reason.
    spaces = [] if is_open else tokenizer.space_token_ids
    return ThinkingBudget(max_tokens, begin, end, calls, spaces)
