"""Text to tokens and back: /tokenize, /detokenize, /tokenizer_info."""

from api_proc.bodies import DetokenizeBody, TokenizeBody, check_chat_prompt
from api_proc.errors import invalid
from api_proc.http.connection import Connection
from api_proc.http.json_body import BodyDecoder
from api_proc.openai.logprobs import token_text
from api_proc.openai.responses import encode
from api_proc.state import ApiState
from api_proc.text.tokenizer import EncodeOptions
from protocol.api_core import ErrorCode

_decode_tokenize = BodyDecoder(TokenizeBody)
_decode_detokenize = BodyDecoder(DetokenizeBody)


async def tokenize(state: ApiState, connection: Connection) -> None:
    max_bytes = state.config.api.max_body_bytes
    raw = await connection.read_body(max_bytes)
    facts = state.require_facts()
    body = _decode_tokenize(raw)
    state.require_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "set either prompt or messages")
    text, param = body.prompt or "", "prompt"
    if body.messages is not None:
        param = "messages"
        check_chat_prompt(body.messages, body.chat_template_kwargs)
        text = await state.text.render(
            [message.for_template() for message in body.messages],
            add_generation_prompt=body.add_generation_prompt is not False,
            extra=body.chat_template_kwargs,
        )
    add_special = body.add_special_tokens
    if add_special is None:
        add_special = body.messages is None
    options = EncodeOptions(add_special, max_tokens=max_bytes)
    [token_ids] = await state.text.encode([text], options, param=param)
    token_strs = None
    if body.return_token_strs:
        token_strs = [token_text(state.text.tokenizer, token_id) for token_id in token_ids]
    answer = {
        "count": len(token_ids),
        "max_model_len": facts.max_model_len,
        "tokens": token_ids,
        "token_strs": token_strs,
    }
    await connection.send(200, encode(answer))


async def detokenize(state: ApiState, connection: Connection) -> None:
    raw = await connection.read_body(state.config.api.max_body_bytes)
    facts = state.require_facts()
    body = _decode_detokenize(raw)
    state.require_model(body.model)
    if len(body.tokens) > facts.max_model_len:
        message = f"may have at most {facts.max_model_len} ids, the model's context"
        raise invalid("tokens", message, ErrorCode.TOO_LONG)
    highest = max(body.tokens, default=0)
    if highest >= facts.vocab_size:
        message = f"token id {highest} is outside the vocabulary of {facts.vocab_size} tokens"
        raise invalid("tokens", message, "token_out_of_range")
    text = state.text.tokenizer.decode(body.tokens, skip_special_tokens=False)
    await connection.send(200, encode({"prompt": text}))


async def tokenizer_info(state: ApiState, connection: Connection) -> None:
    """GET /tokenizer_info: tokenizer_config.json with the chat template in use."""
    template = state.text.template
    info = dict(state.text.tokenizer_config) | dict(state.text.tokenizer.special_tokens)
    info["chat_template"] = None if template is None else template.source
    await connection.send(200, encode(info))
