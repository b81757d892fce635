"""A client that comes back: the rest of an answer from where it was interrupted."""

from collections.abc import Callable

from api_proc.answering import Reply, answer
from api_proc.connection import Connection
from api_proc.event_ids import parse_event_id
from api_proc.generation import Generation
from api_proc.sessions import Reread, request_not_found
from api_proc.state import ApiState


async def resumed(
    state: ApiState,
    connection: Connection,
    path: str,
    raw: bytes,
    make_reply: Callable[[Reread, Generation], Reply],
) -> bool:
    """Answer a request that was accepted before; False where it was not.

    The answer is what comes after the last event that the client has seen, or everything.

    Raises:
        ApiError: 409 where its id belongs to another request, 404 or 503 where it asks for the rest
            of one that is not known, 400 where the last event is none of this request; as `answer`.
    """
    last_event_id = connection.last_event_id or None
    if state.sessions is None:
        if last_event_id is not None:
            raise request_not_found(connection.request_id)
        return False
    session = state.sessions.find(connection.request_id, path, raw, last_event_id)
    if session is None:
        return False
    told: list[int | None] = [None] * len(session.histories)
    is_usage_told = False
    if session.body.stream and last_event_id is not None:
        limits = [add.sampling_params.max_tokens for add in session.accepted.adds]
        told, is_usage_told = parse_event_id(last_event_id, session.request_id, limits)
    with Generation(state, session.body, connection, session) as generation:
        connection.watch(generation.cancel, lambda: generation.num_unread)
        generation.resume(told, is_usage_told=is_usage_told)
        reply = make_reply(Reread(session.body, session.prompts), generation)
        await answer(connection, generation, reply, is_streamed=bool(session.body.stream))
    return True
