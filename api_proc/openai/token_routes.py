"""Text to tokens and back: /tokenize, /detokenize, /apply-template, /tokenizer_info."""

from collections.abc import Callable
from typing import Any

import msgspec

from api_proc.bodies import DetokenizeBody, TemplateBody, TokenizeBody, wants_generation_prompt
from api_proc.errors import invalid
from api_proc.generation.messages import ChatMessage, check_chat_prompt, check_continuation
from api_proc.generation.unsupported_fields import reject_unsupported
from api_proc.http.connection import Connection, encode
from api_proc.http.json_body import BodyDecoder, Turn
from api_proc.openai.logprobs import token_text
from api_proc.state import ApiState
from api_proc.text.tokenizer import EncodeOptions
from protocol.api_core import ErrorCode
from protocol.model_facts import ModelFacts

MAX_TOKENS = 2**20
"""Maximum number of tokens in a text if the model's context is shorter."""
_SLICE_TOKENS = 4096
_NO_FOREIGN: dict[str, str] = {}
"""No fields constrain an output, since there is no output."""

_decode_tokenize = BodyDecoder(TokenizeBody)
_decode_detokenize = BodyDecoder(DetokenizeBody)
_decode_template = BodyDecoder(TemplateBody)


class Tokenized(msgspec.Struct, kw_only=True):
    """Response of /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct):
    """Response of /detokenize."""

    prompt: str


class Rendered(msgspec.Struct):
    """Response of /apply-template."""

    prompt: str


async def tokenize(state: ApiState, connection: Connection) -> None:
    raw = await connection.read_body(state.config.api.max_body_bytes)
    facts = state.require_facts()
    with Turn(state.large_requests) as turn:
        body, unknown = await _decode_tokenize.in_slices(raw, turn)
        reject_unsupported(body, "")
        connection.headers += state.unknown_fields.check(raw, unknown, _NO_FOREIGN)
        await turn.rest()
        answer = await connection.while_connected(_tokenize(state, body, facts, turn))
    await connection.send(200, answer)


async def _tokenize(state: ApiState, body: TokenizeBody, facts: ModelFacts, turn: Turn) -> bytes:
    state.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "set either prompt or messages")
    text, param = body.prompt or "", "prompt"
    if body.messages is not None:
        param = "messages"
        text = await _render(state, body, body.messages)
    add_special = body.add_special_tokens
    if add_special is None:
        add_special = body.messages is None
    options = EncodeOptions(add_special, max_tokens=max(MAX_TOKENS, facts.max_model_len))
    is_literal = body.parse_special is False
    [token_ids] = await state.text.encode([text], options, param=param, is_literal=is_literal)
    tokenizer = state.text.tokenizer
    tokens = await _in_slices(token_ids, list, turn)
    token_strs = b"null"
    if body.return_token_strs:
        token_strs = await _in_slices(
            token_ids, lambda ids: [token_text(tokenizer, token_id) for token_id in ids], turn
        )
    return b'{"count":%d,"max_model_len":%d,"tokens":%b,"token_strs":%b}' % (
        len(token_ids),
        facts.max_model_len,
        tokens,
        token_strs,
    )


async def _in_slices(
    token_ids: list[int], convert: Callable[[list[int]], list[Any]], turn: Turn
) -> bytes:
    """Encode a list with the results of `convert` for the ids; other tasks run in between."""
    parts: list[bytes] = []
    for start in range(0, len(token_ids), _SLICE_TOKENS):
        if start:
            await turn.pause()
        parts.append(encode(convert(token_ids[start : start + _SLICE_TOKENS]))[1:-1])
    return b"[%b]" % b",".join(parts)


async def apply_template(state: ApiState, connection: Connection) -> None:
    """POST /apply-template: the text of a chat's prompt."""
    raw = await connection.read_body(state.config.api.max_body_bytes)
    state.require_facts()
    with Turn(state.large_requests) as turn:
        body, unknown = await _decode_template.in_slices(raw, turn)
        reject_unsupported(body, "")
        connection.headers += state.unknown_fields.check(raw, unknown, _NO_FOREIGN)
        state.require_model(body.model)
        await turn.rest()
        text = await connection.while_connected(_render(state, body, body.messages))
    await connection.send_json(Rendered(str(text)))


async def _render(
    state: ApiState, body: TokenizeBody | TemplateBody, messages: list[ChatMessage]
) -> str:
    check_chat_prompt(messages, body.chat_template_kwargs)
    is_continued = bool(body.continue_final_message)
    check_continuation(messages, body.add_generation_prompt, is_continued)
    return await state.text.render(
        [message.for_template() for message in messages],
        add_generation_prompt=wants_generation_prompt(body),
        extra=body.chat_template_kwargs,
        tools=body.tools or None,
        continue_final_message=is_continued,
    )


async def detokenize(state: ApiState, connection: Connection) -> None:
    raw = await connection.read_body(state.config.api.max_body_bytes)
    facts = state.require_facts()
    with Turn(state.large_requests) as turn:
        body, unknown = await _decode_detokenize.in_slices(raw, turn)
        connection.headers += state.unknown_fields.check(raw, unknown, _NO_FOREIGN)
        state.require_model(body.model)
        if len(body.tokens) > facts.max_model_len:
            message = f"may have at most {facts.max_model_len} ids, the model's context"
            raise invalid("tokens", message, ErrorCode.TOO_LONG)
        highest = await _highest(body.tokens, turn)
        if highest >= facts.vocab_size:
            message = f"token id {highest} is outside the vocabulary of {facts.vocab_size} tokens"
            raise invalid("tokens", message, "token_out_of_range")
        await turn.rest()
        text = await connection.while_connected(state.text.decode(body.tokens))
    await connection.send_json(Detokenized(text))


async def _highest(token_ids: list[int], turn: Turn) -> int:
    """Return the highest of the ids, letting other tasks run in between."""
    highest = 0
    for start in range(0, len(token_ids), _SLICE_TOKENS):
        if start:
            await turn.pause()
        highest = max(highest, *token_ids[start : start + _SLICE_TOKENS])
    return highest


async def tokenizer_info(state: ApiState, connection: Connection) -> None:
    """GET /tokenizer_info: tokenizer_config.json with the chat template in use."""
    template = state.text.template
    info = dict(state.text.tokenizer_config) | dict(state.text.tokenizer.special_tokens)
    info["chat_template"] = None if template is None else template.source
    await connection.send_json(info)
