"""Routes about one request, which the API process that owns the request has to answer."""

from api_proc.http.connection import Connection
from api_proc.peers.peers import HEAD_TIMEOUT_S
from api_proc.state import ApiState


async def forward_to_owner(
    state: ApiState,
    connection: Connection,
    request_id: str,
    body: bytes,
    *,
    timeout_s: float | None = HEAD_TIMEOUT_S,
) -> bool:
    """Let the process that owns `request_id` answer, as `Peers.forward`; False: this one has to.

    The id has no prefix, and the body was read.
    """
    if state.peers is None:
        return False
    return await state.peers.forward(connection, request_id, body, timeout_s=timeout_s)


def note_session(state: ApiState, connection: Connection) -> None:
    """Note what counts a generation that may be in a journal, before its body is read.

    Requests for other routes count by themselves, whatever their ids are. After the body was read
    this has no effect: what counts the request must not change.
    """
    if state.sessions is not None and not connection.has_unread_body:
        connection.lease.session = state.sessions.lease_of(connection.request_id)
        connection.lease.is_foreign = _is_foreign(state, connection)


def _is_foreign(state: ApiState, connection: Connection) -> bool:
    """Return whether another process owns this request, if it is a generation in a journal."""
    has_others = state.peers is not None and not connection.is_forwarded
    is_named = has_others and connection.has_client_id
    return is_named and state.ids.owner_of(connection.request_id) != state.ids.index


async def forward_session(state: ApiState, connection: Connection, raw: bytes) -> bool:
    """Forward a generation that may be in a journal: its client has named it.

    An id that this process has just drawn is its own.
    """
    if state.sessions is None or not connection.has_client_id:
        return False
    return await forward_to_owner(state, connection, connection.request_id, raw, timeout_s=None)
