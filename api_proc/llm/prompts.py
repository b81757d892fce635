"""The forms of a prompt, and how they and chats become token ids."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import msgspec

from api_proc.errors import ApiError
from api_proc.generation.messages import Messages, check_chat_prompt
from api_proc.http.decoding_errors import from_decoding
from api_proc.text.output_sequence import Prompt
from api_proc.text.processor import TextProcessor
from api_proc.text.tokenizer import EncodeOptions
from protocol.api_core import ErrorCode, RequestError
from protocol.client.errors import RequestFailed, failure_of

PromptType = str | Sequence[int] | Mapping[str, Any]
"""A text, token ids, {"prompt": text} or {"prompt_token_ids": ids}."""
Message = Mapping[str, Any]
"""{"role": ..., "content": ...}"""

_FORMS = 'a prompt is a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}'


def invalid(param: str, message: str) -> RequestFailed:
    return failure_of(RequestError(ErrorCode.INVALID, f"{param}: {message}", param))


def from_api_error(error: ApiError) -> RequestFailed:
    """Translate an error of the text side."""
    is_overload = error.status == 429
    known = {code.value: code for code in ErrorCode}
    code = ErrorCode.OVERLOADED if is_overload else known.get(error.code or "", ErrorCode.INVALID)
    return failure_of(RequestError(code, error.message, error.param))


def is_one_prompt(prompts: PromptType | Sequence[PromptType]) -> TypeGuard[PromptType]:
    """Distinguish one prompt from a list of them."""
    if isinstance(prompts, str | Mapping):
        return True
    if not isinstance(prompts, Sequence):
        raise invalid("prompts", f"must be a prompt or a list of prompts; {_FORMS}")
    return len(prompts) > 0 and isinstance(prompts[0], int)


def is_one_chat(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> bool:
    """Distinguish the messages of one chat from a list of chats."""
    return len(messages) > 0 and isinstance(messages[0], Mapping)


async def tokenized(
    text: TextProcessor, prompt: PromptType, max_tokens: int, *, num_outputs: int = 1
) -> Prompt:
    """Return the token ids of a prompt; RequestFailed: it has no valid form, or is too long."""
    value: object = prompt
    if isinstance(prompt, Mapping):
        names = [name for name in ("prompt", "prompt_token_ids") if name in prompt]
        unknown = prompt.keys() - {"prompt", "prompt_token_ids"}
        if unknown:
            raise invalid("prompt", f"the key {min(unknown)!r} is not supported; {_FORMS}")
        if len(names) != 1:
            raise invalid("prompt", _FORMS)
        value = prompt[names[0]]
    if isinstance(value, str):
        options = EncodeOptions(True, max_tokens, num_outputs=num_outputs)
        return Prompt(await _encoded(text, value, options, "prompt"), value)
    if not isinstance(value, Iterable) or isinstance(value, bytes | Mapping):
        raise invalid("prompt", _FORMS)
    return Prompt(list(value), None)  # the engine's client checks the ids


async def tokenized_pair(
    text: TextProcessor, pair: tuple[str, str], max_tokens: int
) -> tuple[Prompt, int]:
    """Return the prompt of two texts, and `second_text_start` of its pooling."""
    options = EncodeOptions(True, max_tokens, num_outputs=0)
    try:
        [(token_ids, second_text_start)] = await text.encode_pairs([pair], options, param="data_2")
    except ApiError as error:
        raise from_api_error(error) from None
    return Prompt(token_ids, None), second_text_start


async def tokenized_chat(
    text: TextProcessor,
    messages: Sequence[Message],
    max_tokens: int,
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: list[dict[str, Any]] | None,
    template_kwargs: dict[str, Any] | None,
) -> Prompt:
    """Return the prompt of a chat."""
    try:
        checked = msgspec.convert(messages, Messages)
        check_chat_prompt(checked, template_kwargs)
        rendered = await text.render(
            [message.for_template() for message in checked],
            add_generation_prompt=add_generation_prompt,
            extra=template_kwargs,
            tools=tools,
            continue_final_message=continue_final_message,
        )
    except msgspec.ValidationError as error:
        problem = from_decoding(error, Messages)
        reason = problem.message.partition(": ")[2]
        raise invalid(f"messages{problem.param or ''}", reason) from None
    except ApiError as error:
        raise from_api_error(error) from None
    options = EncodeOptions(False, max_tokens)  # the template contains the special tokens
    return Prompt(await _encoded(text, rendered, options, "messages"), rendered)


async def _encoded(
    text: TextProcessor, value: str, options: EncodeOptions, param: str
) -> list[int]:
    try:
        [token_ids] = await text.encode([value], options, param=param)
    except ApiError as error:
        raise from_api_error(error) from None
    return token_ids
