"""A client that comes back: the rest of an answer from where it was interrupted."""

from collections.abc import Callable

from api_proc.answering import Reply, answer
from api_proc.connection import Connection
from api_proc.event_ids import parse_event_id
from api_proc.generation import Generation
from api_proc.sessions import Session
from api_proc.state import ApiState


def find_session(state: ApiState, connection: Connection, path: str, raw: bytes) -> Session | None:
    """Return what this request was accepted as before, if it was.

    Raises:
        ApiError: 409 where its id belongs to another request, 404 where it asks for the rest of one
            that is not known.
    """
    if state.sessions is None:
        return None
    return state.sessions.find(connection.request_id, path, raw, connection.last_event_id)


async def resume(
    state: ApiState,
    connection: Connection,
    session: Session,
    make_reply: Callable[[Generation], Reply],
) -> None:
    """Answer with what comes after the last event that the client has seen, or with everything.

    Raises:
        ApiError: 400 where the last event is none of this request; as `answer`.
    """
    told: list[int | None] = [None] * len(session.histories)
    is_usage_told = False
    if session.body.stream and connection.last_event_id is not None:
        told, is_usage_told = parse_event_id(
            connection.last_event_id, session.request_id, len(session.histories)
        )
    with Generation(state, session.body, connection, session) as generation:
        connection.watch(generation.cancel, lambda: generation.num_unread)
        generation.resume(told, is_usage_told=is_usage_told)
        reply = make_reply(generation)
        await answer(connection, generation, reply, is_streamed=bool(session.body.stream))
