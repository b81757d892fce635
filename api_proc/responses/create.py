"""POST /v1/responses: the chat route with other bodies and answers; and the count of its input."""

import msgspec

from api_proc.errors import ApiError, invalid
from api_proc.generation.messages import MAX_MESSAGES, ChatMessage, check_arguments
from api_proc.generation.serving import GenerationApi
from api_proc.http.connection import Connection
from api_proc.http.json_body import Turn
from api_proc.openai.chat import CHAT, tokenize_chat
from api_proc.openai.token_routes import MAX_TOKENS
from api_proc.responses.body import ResponseDecoder, ResponsesChat, renamed
from api_proc.responses.history import earlier_turns, items_of
from api_proc.responses.items import InputItem, messages_of
from api_proc.responses.objects import InputTokens
from api_proc.responses.positions import stream_position
from api_proc.responses.reply import ResponseReply
from api_proc.state import ApiState
from api_proc.text.output_sequence import Prompt
from protocol.api_core import ErrorCode
from protocol.model_facts import ModelFacts


async def _tokenize(state: ApiState, body: ResponsesChat, facts: ModelFacts) -> list[Prompt]:
    prompts = await _with_earlier_turns(state, body, facts)
    body.chat_template_kwargs = None  # they may be large, and the ids are known
    return prompts


async def _with_earlier_turns(
    state: ApiState, body: ResponsesChat, facts: ModelFacts
) -> list[Prompt]:
    previous_id = body.request.previous_response_id
    if previous_id is None:
        return await _prompts(state, body, facts, [])
    turns = await earlier_turns(state, previous_id)
    # A conversation costs as much as a body of its size, until it is tokenized.
    lease = state.budget.open(sum(turn.num_bytes for turn in turns))
    try:
        return await _prompts(state, body, facts, await items_of(turns))
    finally:
        lease.close()


async def _prompts(
    state: ApiState, body: ResponsesChat, facts: ModelFacts, earlier: list[InputItem]
) -> list[Prompt]:
    request = body.request
    assert isinstance(request.input, list)
    items = earlier + request.input
    if len(items) > MAX_MESSAGES:
        raise invalid("input", f"the conversation has more than {MAX_MESSAGES} items")
    body.messages = messages_of(request.instructions, items)
    check_arguments(body.messages, "input")
    try:
        prompts = await tokenize_chat(state, body, facts)
        if request.truncation != "auto" or _has_room(body, facts, prompts):
            return prompts
    except ApiError as error:
        if request.truncation != "auto" or error.code != ErrorCode.TOO_LONG:
            raise
    finally:
        messages, body.messages = body.messages, []
    return await _truncated(state, body, facts, messages)


def _has_room(body: ResponsesChat, facts: ModelFacts, prompts: list[Prompt]) -> bool:
    return len(prompts[0].token_ids) + (body.output_limit[1] or 1) <= facts.max_model_len


async def _truncated(
    state: ApiState, body: ResponsesChat, facts: ModelFacts, messages: list[ChatMessage]
) -> list[Prompt]:
    """Drop the fewest of the oldest turns, so that the rest fits; instructions are kept."""
    instructions = _leading_system(messages)
    starts = [i for i, message in enumerate(messages) if message.role == "user"]
    starts = [i for i in starts if i > len(instructions)]
    fitting: list[Prompt] | None = None
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        body.messages = instructions + messages[starts[middle] :]
        try:
            prompts = await tokenize_chat(state, body, facts)
        except ApiError as error:
            if error.code != ErrorCode.TOO_LONG:
                raise
            prompts = []
        if prompts and _has_room(body, facts, prompts):
            fitting, high = prompts, middle
        else:
            low = middle + 1
    body.messages = []
    if fitting is None:
        message = f"the last turn alone does not fit into {facts.max_model_len} tokens"
        raise invalid("input", message, ErrorCode.TOO_LONG)
    return fitting


def _leading_system(messages: list[ChatMessage]) -> list[ChatMessage]:
    for i, message in enumerate(messages):
        if message.role != "system":
            return messages[:i]
    return messages


RESPONSES: GenerationApi[ResponsesChat] = GenerationApi(
    path="/v1/responses",
    decode=ResponseDecoder(),
    prompt_param="input",
    tokenize=_tokenize,
    restore_prompts=CHAT.restore_prompts,
    make_answer=ResponseReply,
    make_parser=CHAT.make_parser,
    constrain=CHAT.constrain,
    parse_position=stream_position,
    shown_error=renamed,
)


async def count_input(state: ApiState, connection: Connection) -> None:
    """POST /v1/responses/input_tokens: the tokens of a prompt, even beyond the model's context.

    Fields that concern the output have no effect here.
    """
    try:
        await _count_input(state, connection)
    except ApiError as error:
        raise renamed(error) from None


async def _count_input(state: ApiState, connection: Connection) -> None:
    raw = await connection.read_body(state.config.api.max_body_bytes)
    facts = state.require_facts()
    with Turn(state.large_requests) as turn:
        body, unknown = await RESPONSES.decode.in_slices(raw, turn)
        connection.headers += state.unknown_fields.check(raw, unknown)
        body.check()
        state.require_model(body.model)
        if body.request.truncation != "auto":
            limit = max(MAX_TOKENS, facts.max_model_len)
            facts = msgspec.structs.replace(facts, max_model_len=limit)
        await turn.rest()
        [prompt] = await connection.while_connected(_with_earlier_turns(state, body, facts))
    await connection.send_json(InputTokens(len(prompt.token_ids)))
