"""POST /v1/messages and POST /v1/messages/count_tokens."""

import msgspec

from api_proc.anthropic.bodies import MessagesBody, PromptBody
from api_proc.anthropic.chat import FOREIGN_NAMES, MessagesChat, MessagesDecoder, prompt_of
from api_proc.anthropic.errors import PATH
from api_proc.anthropic.history import instructions_as_user
from api_proc.anthropic.objects import TokenCount
from api_proc.anthropic.positions import stream_position
from api_proc.anthropic.reply import MessageReply
from api_proc.errors import ApiError
from api_proc.generation.serving import GenerationApi
from api_proc.http.connection import Connection
from api_proc.http.json_body import BodyDecoder, Turn
from api_proc.openai.chat import CHAT
from api_proc.openai.token_routes import MAX_TOKENS
from api_proc.state import ApiState
from api_proc.text.output_sequence import Prompt
from protocol.model_facts import ModelFacts

_TEMPLATE_ERROR = "chat_template_error"

_CONCERN_OUTPUT = frozenset((*MessagesBody.__struct_fields__, *FOREIGN_NAMES))

_decode_prompt = BodyDecoder(PromptBody)


async def _tokenize(state: ApiState, chat: MessagesChat, facts: ModelFacts) -> list[Prompt]:
    """Make the prompt; a template may reject instructions that are not at the beginning."""
    if not state.text.dialect.has_reasoning:
        chat.thinking_token_budget = None  # such a model keeps any budget
    try:
        return await CHAT.tokenize(state, chat, facts)
    except ApiError as error:
        has_later = any(message.role == "system" for message in chat.messages[1:])
        if error.code != _TEMPLATE_ERROR or not has_later:
            raise
    chat.messages = instructions_as_user(chat.messages)
    return await CHAT.tokenize(state, chat, facts)


MESSAGES: GenerationApi[MessagesChat] = GenerationApi(
    path=PATH,
    decode=MessagesDecoder(),
    prompt_param="messages",
    tokenize=_tokenize,
    restore_prompts=CHAT.restore_prompts,
    make_answer=MessageReply,
    make_parser=CHAT.make_parser,
    constrain=CHAT.constrain,
    parse_position=stream_position,
)


async def count_tokens(state: ApiState, connection: Connection) -> None:
    """Count the tokens of a prompt, which may be longer than the model's context.

    Fields that concern the output have no effect here.
    """
    raw = await connection.read_body(state.config.api.max_body_bytes)
    facts = state.require_facts()
    with Turn(state.large_requests) as turn:
        body, unknown = await _decode_prompt.in_slices(raw, turn)
        unknown = [name for name in unknown if name not in _CONCERN_OUTPUT]
        connection.headers += state.unknown_fields.check(raw, unknown)
        chat = prompt_of(body)
        chat.check()
        state.require_model(chat.model)
        limit = max(MAX_TOKENS, facts.max_model_len)
        await turn.rest()
        long = msgspec.structs.replace(facts, max_model_len=limit)
        [prompt] = await connection.while_connected(_tokenize(state, chat, long))
    await connection.send_json(TokenCount(len(prompt.token_ids)))
