"""POST /v1/chat/completions: from its body to a generation."""

from functools import partial
from typing import Any

from api_proc.answering import answer
from api_proc.bodies import ChatBody, ChatMessage, check_chat
from api_proc.chat_reply import ChatReply
from api_proc.connection import Connection
from api_proc.errors import from_request_error
from api_proc.generation import Generation
from api_proc.json_body import BodyDecoder
from api_proc.params import resolve_max_tokens, sampling_params, tokens_to_keep
from api_proc.resuming import resumed
from api_proc.sequence import Prompt
from api_proc.sessions import Reread
from api_proc.state import ApiState
from protocol.api_core import AddRequest
from protocol.core_worker import ModelFacts
from protocol.errors import RequestFailed

PATH = "/v1/chat/completions"
_decode = BodyDecoder(ChatBody)


async def chat_completions(state: ApiState, connection: Connection) -> None:
    """Serve one request.

    Raises:
        ApiError: it is refused, or fails before anything was sent.
    """
    raw = await connection.read_body(state.config.api.max_body_bytes)
    make_reply = partial(_reply, state, connection)
    if await resumed(state, connection, PATH, raw, make_reply):
        return
    facts = await state.accepting()
    body = _decode(raw)
    check_chat(body)
    state.require_model(body.model)
    with Generation(state, body, connection) as generation:
        connection.watch(generation.cancel, lambda: generation.num_unread)
        prompt = Prompt(await _tokenize(state, body, facts), None)
        if generation.cancelled:
            return
        if await resumed(state, connection, PATH, raw, make_reply):  # it has come twice meanwhile
            return
        generation.remember(PATH, raw, [prompt])
        _submit(state, generation, body, prompt.token_ids, facts)
        await generation.accepted()
        reply = make_reply(Reread(body, [prompt]), generation)
        await answer(connection, generation, reply, is_streamed=bool(body.stream))


def reread(raw: bytes, adds: list[AddRequest]) -> Reread:
    """Make of a body and its sequences what they were when they were accepted.

    Raises:
        ApiError: it is no body of this route.
    """
    return Reread(_decode(raw), [Prompt(adds[0].prompt_token_ids, None)])


def _reply(
    state: ApiState, connection: Connection, content: Reread, generation: Generation
) -> ChatReply:
    body, prompts = content
    assert isinstance(body, ChatBody)
    return ChatReply(state, connection.request_id, body, prompts[0].token_ids, generation)


def template_messages(messages: list[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates expect them: text in one piece, and no fields that were not given."""
    return [_template_message(message) for message in messages]


def _template_message(message: ChatMessage) -> dict[str, Any]:
    content = message.content
    if isinstance(content, list):
        content = "\n".join([part.text or "" for part in content])
    role = "system" if message.role == "developer" else message.role
    result = {"role": role, "content": content or ""}
    for name in ("name", "tool_call_id", "reasoning_content"):
        value = getattr(message, name)
        if value is not None:
            result[name] = value
    return result


async def _tokenize(state: ApiState, body: ChatBody, facts: ModelFacts) -> list[int]:
    prompt = await state.text.render(
        template_messages(body.messages),
        add_generation_prompt=body.add_generation_prompt is not False,
        extra=body.chat_template_kwargs,
    )
    max_tokens = body.max_completion_tokens or body.max_tokens
    encoded = await state.text.encode(
        [prompt],
        param="messages",
        add_special_tokens=bool(body.add_special_tokens),
        max_tokens=facts.max_model_len - 1,
        keep_last=tokens_to_keep(body, max_tokens, facts),
    )
    return encoded[0]


def _submit(
    state: ApiState,
    generation: Generation,
    body: ChatBody,
    prompt_token_ids: list[int],
    facts: ModelFacts,
) -> None:
    """Send the prompt to the core.

    Raises:
        ApiError: the engine refuses it.
    """
    asked, param = body.max_completion_tokens, "max_completion_tokens"
    if asked is None:
        asked, param = body.max_tokens, "max_tokens"
    max_tokens = resolve_max_tokens(asked, None, facts, len(prompt_token_ids), param)
    params = sampling_params(
        body,
        state.text.defaults,
        max_tokens=max_tokens,
        seed=state.draw_seed() if body.seed is None else body.seed,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    try:
        generation.submit(prompt_token_ids, params)
    except RequestFailed as failure:
        raise from_request_error(failure.error, "messages") from failure
