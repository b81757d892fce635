"""POST /v1/completions: from its body to a generation."""

from functools import partial
from typing import NamedTuple

from api_proc.answering import answer
from api_proc.bodies import CompletionBody, check_completion
from api_proc.completion_reply import CompletionReply
from api_proc.connection import Connection
from api_proc.errors import from_request_error, invalid
from api_proc.generation import Generation
from api_proc.json_body import BodyDecoder
from api_proc.params import resolve_max_tokens, sampling_params, tokens_to_keep
from api_proc.resuming import resumed
from api_proc.sequence import Prompt
from api_proc.sessions import Reread
from api_proc.state import ApiState
from api_proc.text import too_long
from protocol.api_core import AddRequest
from protocol.core_worker import ModelFacts
from protocol.errors import RequestFailed

PATH = "/v1/completions"
DEFAULT_MAX_TOKENS = 16
MAX_SEQUENCES = 2048
"""Prompts times n of one request."""

_decode = BodyDecoder(CompletionBody)


class _Items(NamedTuple):
    """The prompts of a body, of which one list is empty."""

    texts: list[str]
    ids: list[list[int]]


async def completions(state: ApiState, connection: Connection) -> None:
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
    check_completion(body)
    state.require_model(body.model)
    items = _items(body)
    _require_short(items.ids, body, facts)
    with Generation(state, body, connection) as generation:
        connection.watch(generation.cancel, lambda: generation.num_unread)
        prompts = await _tokenize(state, body, items, facts)
        if generation.cancelled:
            return
        if await resumed(state, connection, PATH, raw, make_reply):  # it has come twice meanwhile
            return
        generation.remember(PATH, raw, prompts)
        _submit(state, generation, body, prompts, facts)
        await generation.accepted()
        reply = make_reply(Reread(body, prompts), generation)
        await answer(connection, generation, reply, is_streamed=bool(body.stream))


def reread(raw: bytes, adds: list[AddRequest]) -> Reread:
    """Make of a body and its sequences what they were when they were accepted.

    Raises:
        ApiError: it is no body of this route.
    """
    body = _decode(raw)
    texts: list[str | None] = [*_items(body).texts]
    ids = [add.prompt_token_ids for add in adds[:: body.n or 1]]
    pairs = zip(ids, texts or [None] * len(ids), strict=True)
    return Reread(body, [Prompt(token_ids, text) for token_ids, text in pairs])


def _reply(
    state: ApiState, connection: Connection, content: Reread, generation: Generation
) -> CompletionReply:
    body, prompts = content
    assert isinstance(body, CompletionBody)
    return CompletionReply(state, connection.request_id, body, prompts, generation)


def _items(body: CompletionBody) -> _Items:
    """Tell the four forms of `prompt` apart.

    Raises:
        ApiError: 400 where a list mixes them, or asks for too many sequences.
    """
    prompt = body.prompt
    if isinstance(prompt, str):
        items = _Items([prompt], [])
    elif isinstance(prompt[0], int):
        items = _Items([], [[i for i in prompt if isinstance(i, int)]])
        _require_uniform(len(items.ids[0]), len(prompt))
    else:
        texts = [item for item in prompt if isinstance(item, str)]
        items = _Items(texts, [item for item in prompt if isinstance(item, list)])
        _require_uniform(max(len(texts), len(items.ids)), len(prompt))
    num_sequences = (len(items.texts) + len(items.ids)) * (body.n or 1)
    if num_sequences > MAX_SEQUENCES:
        message = f"prompts times n are {num_sequences} sequences, more than {MAX_SEQUENCES}"
        raise invalid("prompt", message)
    return items


def _require_uniform(num_of_one_kind: int, num_items: int) -> None:
    if num_of_one_kind != num_items:
        message = "a list must hold texts only, token ids only, or lists of token ids only"
        raise invalid("prompt", message)


def _require_short(ids: list[list[int]], body: CompletionBody, facts: ModelFacts) -> None:
    """Refuse what is too long before anything else looks at every id of it."""
    longest = max(map(len, ids), default=0)
    if longest >= facts.max_model_len and body.truncate_prompt_tokens is None:
        raise too_long(longest, facts.max_model_len - 1, "prompt")


async def _tokenize(
    state: ApiState, body: CompletionBody, items: _Items, facts: ModelFacts
) -> list[Prompt]:
    keep_last = tokens_to_keep(body, body.max_tokens, facts)
    if items.ids:
        return [Prompt(ids if keep_last is None else ids[-keep_last:], None) for ids in items.ids]
    encoded = await state.text.encode(
        items.texts,
        param="prompt",
        add_special_tokens=body.add_special_tokens is not False,
        max_tokens=facts.max_model_len - 1,
        keep_last=keep_last,
    )
    return [Prompt(ids, text) for ids, text in zip(encoded, items.texts, strict=True)]


def _submit(
    state: ApiState,
    generation: Generation,
    body: CompletionBody,
    prompts: list[Prompt],
    facts: ModelFacts,
) -> None:
    """Send all prompts to the core.

    Raises:
        ApiError: the engine refuses one of them.
    """
    wanted = (body.prompt_logprobs, body.logprobs if body.echo else None)
    num_prompt_logprobs = max((num for num in wanted if num is not None), default=None)
    try:
        for prompt in prompts:
            max_tokens = resolve_max_tokens(
                body.max_tokens, DEFAULT_MAX_TOKENS, facts, len(prompt.token_ids), "max_tokens"
            )
            params = sampling_params(
                body,
                state.text.defaults,
                max_tokens=max_tokens,
                seed=state.draw_seed() if body.seed is None else body.seed,
                logprobs=body.logprobs,
                prompt_logprobs=num_prompt_logprobs,
            )
            generation.submit(prompt.token_ids, params)
    except RequestFailed as failure:
        raise from_request_error(failure.error, "prompt") from failure
