"""POST /invocations, SageMaker's only route to a model: the body's fields choose the route."""

import msgspec

from api_proc.errors import invalid
from api_proc.http.connection import Connection
from api_proc.http.json_body import BodyDecoder, Turn
from api_proc.openai.chat import CHAT
from api_proc.openai.completions import COMPLETIONS
from api_proc.peers.forwarding import note_session
from api_proc.pooling.classify import classify
from api_proc.pooling.embeddings import create_embeddings
from api_proc.pooling.scores import create_scores, rerank
from api_proc.state import ApiState

_BY_FIELD = {
    "messages": CHAT.serve,
    "prompt": COMPLETIONS.serve,
    "query": rerank,
    **dict.fromkeys(("text_1", "queries", "items", "data_1"), create_scores),
    "input": create_embeddings,
}
"""The route that handles a body with this field; the first match counts."""


class InvocationBody(msgspec.Struct):
    """Body of one of the routes that generate, embed, score or classify."""


_decode = BodyDecoder(InvocationBody)


async def invoke(state: ApiState, connection: Connection) -> None:
    """POST /invocations; classifies `input` if the model has labels, and otherwise embeds it."""
    note_session(state, connection)
    raw = await connection.read_body(state.config.api.max_body_bytes)
    with Turn(state.large_requests) as turn:
        _, names = await _decode.in_slices(raw, turn)
    handler = next((_BY_FIELD[name] for name in _BY_FIELD if name in names), None)
    if handler is None:
        raise invalid("body", f"must have one of the fields {', '.join(_BY_FIELD)}")
    if handler is create_embeddings:
        facts = await state.accepting(connection.origin)
        handler = classify if facts.num_labels else handler
    connection.unread(raw)
    raw = b""
    await handler(state, connection)
